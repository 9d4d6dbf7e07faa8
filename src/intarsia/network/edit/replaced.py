"""What was replaced by what, and when: what is recorded of a graph in its old values is told in today's."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir


class InputChange(NamedTuple):
    """One read of a layer was redirected; `still_read` if the layer reads `old` at another position too."""

    time: int
    old: ir.Value | None
    new: ir.Value
    still_read: bool


class Replacements:
    """The replacements of one graph. `clock` counts them, so that a record sees those made after it."""

    def __init__(self) -> None:
        self.clock: int = 0
        self._values: dict[ir.Value, list[tuple[int, ir.Value]]] = {}
        self._inputs: dict[ir.Node, list[InputChange]] = {}

    def value_replaced(self, old: ir.Value, new: ir.Value) -> None:
        """All readers of `old` read `new` from now on."""
        self.clock += 1
        self._values.setdefault(old, []).append((self.clock, new))

    def value_restored(self, old: ir.Value) -> None:
        """The last replacement of `old` was undone."""
        self._values[old].pop()

    def input_replaced(self, node: ir.Node, old: ir.Value | None, new: ir.Value) -> None:
        """One read of a layer goes to `new` from now on."""
        self.clock += 1
        change = InputChange(self.clock, old, new, old in node.inputs)
        self._inputs.setdefault(node, []).append(change)

    def input_restored(self, node: ir.Node) -> None:
        """The last redirection of one of a layer's reads was undone."""
        self._inputs[node].pop()

    def inputs_since(self, node: ir.Node, time: int) -> list[InputChange]:
        """The redirections of single reads of a layer after `time`."""
        return [change for change in self._inputs.get(node, ()) if change.time > time]

    def follow(self, value: ir.Value, time: int, until: int | None = None) -> ir.Value:
        """What stands now, or stood right before `until`, for a value that was mentioned at `time`."""
        while True:
            for when, new in self._values.get(value, ()):
                if when > time and (until is None or when < until):
                    time, value = when, new
                    break
            else:
                return value

"""The graph walked from inputs to outputs, and each operator's rule asked where it leaves the batch.

A server that runs several requests as one batch may do so only if no row sees another, nor its own number,
nor how many there are. Running the model cannot prove that; so each value of the graph is followed from the
inputs, whose first axis is the batch, to the outputs, whose first axis must be. An operator without a rule
ends it. The graph is run at two batch sizes, because a size may equal the batch's by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from intarsia.graph.nodes import whereabouts
from intarsia.serve.rows.call import Call, Mixes, Rows
from intarsia.serve.rows.rules import placement


def mixing(module: fx.GraphModule, calls: Sequence[tuple[int, Sequence[Any]]]) -> str | None:
    """Why rows cannot be computed apart, as a clause, or None if they can.

    `calls` are the graph's flat inputs at several batch sizes, each with its size. Every tensor among them
    has the batch as its first axis.
    """
    found: list[dict[fx.Node, Any]] = []
    for size, inputs in calls:
        walk = _Walk(module, size)
        try:
            with torch.no_grad():
                walk.run(*inputs)
        except Mixes as error:
            return str(error).splitlines()[0]  # the interpreter adds lines of its own
        except Exception as error:  # whatever an operator says: what does not run cannot be followed
            said = next(iter(str(error).splitlines()), "")
            return f"the graph does not run at {size} rows ({type(error).__name__}: {said})"
        found.append(walk.placed)
    for node in module.graph.nodes:
        if any(placed[node] != found[0][node] for placed in found[1:]):
            return f"where the batch is depends on its size ({whereabouts(node)})"
    return _outputs(module, found[0])


def _outputs(module: fx.GraphModule, placed: Mapping[fx.Node, Any]) -> str | None:
    returned: Any = next(iter(reversed(module.graph.nodes))).args[0]
    for number, item in enumerate(returned):
        if isinstance(item, fx.Node) and placed[item] != Rows(0):
            return f"output {number} does not have one entry for each row along its first axis"
    return None


class _Walk(fx.Interpreter):
    """Runs the graph, and notes for each value where the batch is in it."""

    def __init__(self, module: fx.GraphModule, size: int) -> None:
        super().__init__(module)
        self._size = size
        self.placed: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.placed[n] = None
        if n.op == "placeholder" and isinstance(value, torch.Tensor):
            self.placed[n] = Rows(0)
        elif n.op == "call_function":
            self.placed[n] = self._placement(n, value)
        return value

    def _placement(self, node: fx.Node, value: Any) -> Any:
        try:
            return placement(Call(node, self._size, value, self.env, self.placed))
        except Mixes as error:
            raise Mixes(f"{error} ({whereabouts(node)})") from None

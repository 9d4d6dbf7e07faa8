"""Results that are views in the model: of an input, a weight or another result, whose memory they share.

The graph that engines get has no views, so that such a result would come in memory of its own, and whoever
writes to the one would not see the other change. The chain of views is therefore kept, and replayed at every
call on the tensor that the caller or the model has. Who writes to a weight that was returned has changed the
model, which the next call tells; a module that was loaded has no model, and returns copies of its weights.

A returned weight is the model's own, as it is in eager: whoever writes to it has changed the model, and the
next call says so. A loaded module has no model beside it and returns copies of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from intarsia.lower.aliases import alias_of, changes, may_copy, written_arguments


@dataclass(frozen=True, eq=False)
class OutputView:
    """How one result is made of what the caller has, or the model.

    `views` takes the flat inputs `reads`, then the results `of`, by their places among the user's results,
    which are no views themselves, then the weights `held`.
    """

    views: fx.GraphModule
    reads: tuple[int, ...]
    of: tuple[int, ...]
    held: tuple[torch.Tensor, ...] = ()

    def __call__(self, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
        return self.views(*(inputs[i] for i in self.reads), *(results[i] for i in self.of), *self.held)


def output_views(program: ExportedProgram) -> tuple[OutputView | None, ...]:
    """For each result that the user gets, how it is a view; None where it is no view of what the user has."""
    returned = returned_by(program)
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    given = [name for name, spec in kinds.items() if spec.kind is InputKind.USER_INPUT]
    written = _written(program.graph)
    places: dict[fx.Node, int] = {}
    for place, item in enumerate(returned):
        if isinstance(item, fx.Node):
            places.setdefault(_unchanged(item), place)
    made: list[OutputView | None] = []
    for place, item in enumerate(returned):
        chain = _Chain(program, kinds, given, places, written)
        found = isinstance(item, fx.Node) and chain.follow(item, place)
        made.append(chain.view() if found else None)
    return tuple(made)


class _Chain:
    """One result followed back to where its memory comes from."""

    def __init__(
        self,
        program: ExportedProgram,
        kinds: dict[str, Any],
        given: list[str],
        places: dict[fx.Node, int],
        written: set[fx.Node],
    ) -> None:
        self.program = program
        self.kinds, self.given, self.places, self.written = kinds, given, places, written
        self.place = -1  # of the result that is followed
        self.order: list[fx.Node] = []
        self.sources: list[tuple[fx.Node, str, Any]] = []  # a node, what it is, its place or itself

    def follow(self, item: fx.Node, place: int) -> bool:
        """Whether the result at `place` lies in memory of an input, a weight or another result."""
        self.place, own = place, _unchanged(item)
        if own.op == "placeholder" and self._is_input(own) and own not in self.written:
            return False  # an input itself: told elsewhere
        if own.op != "placeholder" and alias_of(own) is None and self.places[own] == place:
            return False  # made by the model
        return self._tensor(own)

    def _tensor(self, node: fx.Node) -> bool:
        node = _unchanged(node)
        if node in self.order or any(node is known for known, _, _ in self.sources):
            return True
        if node.op == "placeholder":
            return self._source(node)
        known = [*self.order], [*self.sources]
        if self._view_of(node, alias_of(node)):
            return True
        self.order, self.sources = known
        if self.places.get(node, self.place) == self.place:
            return False
        self.sources.append((node, "result", self.places[node]))
        return True

    def _view_of(self, node: fx.Node, base: fx.Node | None) -> bool:
        if base is None or not self._tensor(base):
            return False
        if not all(self._number(other) for other in node.all_input_nodes if other is not base):
            return False
        if node.target is torch.ops.aten.as_strided.default and self.sources[0][1] == "result":
            return False  # an engine's strides are its own
        self.order.append(node)
        return not (may_copy(node) and self._root_is_written())

    def _source(self, node: fx.Node) -> bool:
        if self._is_input(node):
            self.sources.append((node, "input", self.given.index(node.name)))
            return True
        spec = self.kinds[node.name]
        held = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or not isinstance(held, torch.Tensor):
            return False  # a number written in the model's code is made anew by every call
        self.sources.append((node, "held", held))
        return True

    def _number(self, node: fx.Node) -> bool:
        """Whether a size can be computed from the same tensors."""
        if node in self.order:
            return True
        if isinstance(node.meta.get("val"), torch.Tensor) or node.op not in ("call_function", "placeholder"):
            return False
        if node.op == "placeholder":
            return self._source(node)
        is_size = node.target is torch.ops.aten.sym_size.int
        follow = self._tensor if is_size else self._number
        if not all(follow(other) for other in node.all_input_nodes):
            return False
        self.order.append(node)
        return True

    def _is_input(self, node: fx.Node) -> bool:
        return self.kinds[node.name].kind is InputKind.USER_INPUT

    def _root_is_written(self) -> bool:
        return any(node in self.written for node, _, _ in self.sources)

    def view(self) -> OutputView:
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        of_kind = {
            kind: [(node, where) for node, what, where in self.sources if what == kind]
            for kind in ("input", "result", "held")
        }
        for node, _ in (source for sources in of_kind.values() for source in sources):
            copied[node] = graph.placeholder(node.name)
        for node in self.order:
            copied[node] = graph.node_copy(node, lambda used: copied[_unchanged(used)])
        last = self.order[-1] if self.order else self.sources[0][0]
        graph.output(copied[last])
        module = fx.GraphModule(torch.nn.Module(), graph)
        return OutputView(module, *(tuple(where for _, where in sources) for sources in of_kind.values()))


def _unchanged(node: fx.Node) -> fx.Node:
    """The tensor itself: what a change in place returns is the tensor it changed."""
    base = alias_of(node) if changes(node) else None
    return node if base is None else _unchanged(base)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The tensors that the model changes in place, by themselves or through a view."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        for held in written_arguments(node):
            base: fx.Node | None = held
            while base is not None:
                found.add(base)
                base = alias_of(base)
    return found


def returned_by(program: ExportedProgram) -> list[Any]:
    """What the user gets: nodes, and plain values."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    pairs = zip(program.graph_signature.output_specs, output.args[0], strict=True)
    return [item for spec, item in pairs if spec.kind is OutputKind.USER_OUTPUT]

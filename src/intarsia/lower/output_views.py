"""Results as the model returns them: views of the same tensors, with the same memory layout.

The graph that engines get has no views, so that such a result would come in memory of its own, and whoever
writes to the one would not see the other change. The chain of views is therefore kept, and replayed at every
call on the tensor that the caller or the model has.

A returned weight is the model's own, as it is in eager: whoever writes to it has changed the model, and the
next call says so. A loaded module has no model beside it and returns copies of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from intarsia.lower.purity import alias_of, changes, may_copy, written_arguments


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
            return False  # an input itself: reported elsewhere
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
            return False  # a number written in the model's code is made again by every call
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


# How results lie in memory in the model: in rows, or as images in channels_last and transposes do.
#
# Engines hand out rows after rows. Who calls `view` on a result, or asks for its strides, must meet those
# that PyTorch gives it: what works on the model's result works on ours.
#
# It costs a copy of such a result. In the zoo that is ConvNeXt's alone, 150 kB.

Order = tuple[int, ...]  # the axes of a tensor from the one whose steps are longest to the shortest
_LAST: dict[int, Order] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}  # of images, by their dimensions


@dataclass(frozen=True)
class Layouts:
    """The order of each result of the user's, None where it is not known; and which inputs had channels last.

    `images` has the inputs that may, by their places in the flat call, and whether they did. Convolutions
    follow them: `others` are the orders of a call whose images are all laid out the other way.
    """

    orders: tuple[Order | None, ...] = ()
    images: tuple[tuple[int, bool], ...] = ()
    others: tuple[Order | None, ...] = ()

    def follow(self, flat: Sequence[Any]) -> bool | None:
        """Whether the images of a call are laid out as those of the example; None where only some are."""
        alike = {has_channels_last(flat[place]) == last for place, last in self.images}
        return None if len(alike) > 1 else alike != {False}


IN_ROWS = Layouts()


def output_layouts(program: ExportedProgram) -> Layouts:
    """How the results of a captured program lie."""
    results = returned_by(program)
    orders = tuple(layout_of(getattr(item, "meta", {}).get("val")) for item in results)
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    inputs = [node for node in nodes if kinds[node.name] is InputKind.USER_INPUT]
    images = {n: node for n, node in enumerate(inputs) if _is_image(node.meta.get("val"))}
    has_images = images and any(order is not None and len(order) in _LAST for order in orders)
    others = _orders_of_others(program, results, set(images.values())) if has_images else ()
    return Layouts(orders, tuple((n, has_channels_last(x.meta["val"])) for n, x in images.items()), others)


def _orders_of_others(
    program: ExportedProgram, results: Sequence[Any], images: set[fx.Node]
) -> tuple[Order | None, ...]:
    """The orders of the results where images come in the other layout: the graph runs on sizes alone."""
    graph = fx.Interpreter(program.graph_module, garbage_collect_values=False)
    try:
        with FakeTensorMode(), torch.no_grad():
            placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
            graph.run(*(_sized(node.meta.get("val"), node in images) for node in placeholders))
        return tuple(layout_of(graph.env.get(item)) for item in results)
    except Exception:  # an operator that needs values: such calls get their images as they are made
        return ()


def _sized(value: Any, is_turned: bool) -> Any:
    """A tensor of the same sizes without values, or a number; `is_turned`, an image in the other layout."""
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes, steps = ([_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    tensor = torch.empty_strided(sizes, steps, dtype=value.dtype, device=value.device)
    if not is_turned:
        return tensor
    return laid_out(tensor, tuple(range(len(sizes))) if has_channels_last(value) else _LAST[len(sizes)])


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in _LAST


def has_channels_last(value: Any) -> bool:
    """Whether an image is laid out by channels last, and not by rows.

    >>> has_channels_last(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    True
    """
    return _is_image(value) and layout_of(value) == _LAST[value.dim()]


def layout_of(value: Any) -> Order | None:
    """The order in which a tensor's axes lie in memory; None where it lies there many times, or is empty.

    Of sizes that vary the order is that of the example. Axes of one element come where rows would have them.

    >>> layout_of(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    (0, 2, 3, 1)
    >>> rows = torch.empty(2, 3)
    >>> layout_of(rows.t()), layout_of(rows), layout_of(rows[:, :1].expand(2, 4))
    ((1, 0), (0, 1), None)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, steps = ([_hint(n) for n in told] for told in (value.shape, value.stride()))
    if 0 in sizes:  # it is empty, or how large it is is not known
        return None
    wide = sorted((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: -steps[axis])
    reach = 1
    for axis in reversed(wide):
        if steps[axis] < reach:
            return None
        reach = steps[axis] * sizes[axis]
    if wide == sorted(wide):
        return tuple(range(len(sizes)))
    alone = [axis for axis, size in enumerate(sizes) if size == 1]
    return (*alone, *wide)


def laid_out(value: Any, order: Order) -> Any:
    """The same numbers with their axes in this order in memory.

    >>> laid_out(torch.ones(2, 3), (1, 0)).stride()
    (1, 2)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if is_rows(order):
        return value.contiguous()
    rows = value.permute(order)
    return value if rows.is_contiguous() else rows.contiguous().permute(_inverse(order))


def is_rows(order: Order) -> bool:
    """Whether an order is the usual one, row by row."""
    return order == tuple(range(len(order)))


def _inverse(order: Sequence[int]) -> Order:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _hint(size: int | torch.SymInt) -> int:
    """A size, or that of the example; 0 where nobody knows it before the model runs."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return hint if isinstance(hint, int) else 0

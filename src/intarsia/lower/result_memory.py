"""The memory of results: views of the same tensors as in the model, with the same layout.

The graph for engines has no views, so a result that is a view in the model would have memory of its own, and
a write to its base would not change it. The chain of views is therefore recorded, and applied at every call
to the tensor of the caller or the model.

A returned weight is the model's own tensor, as in eager. A write to it changes the model, and the next call
reports that. A loaded module has no model and returns copies of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from intarsia.lower.purity import alias_of, changes, may_copy, written_arguments


@dataclass(frozen=True, eq=False)
class OutputView:
    """The views that make one result from tensors of the caller or the model.

    `views` takes the flat inputs at `reads`, then the user's results at `of`, which are no views themselves,
    then the weights `held`.
    """

    views: fx.GraphModule
    reads: tuple[int, ...]
    of: tuple[int, ...]
    held: tuple[torch.Tensor, ...] = ()

    def __call__(self, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
        return self.views(*(inputs[i] for i in self.reads), *(results[i] for i in self.of), *self.held)


def output_views(program: ExportedProgram) -> tuple[OutputView | None, ...]:
    """For each result of the user's, the views that make it; None if it shares memory with nothing."""
    returned = returned_by(program)
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    user_inputs = [name for name, spec in kinds.items() if spec.kind is InputKind.USER_INPUT]
    written = _written(program.graph)
    places: dict[fx.Node, int] = {}
    for place, item in enumerate(returned):
        if isinstance(item, fx.Node):
            places.setdefault(_unchanged(item), place)
    views: list[OutputView | None] = []
    for place, item in enumerate(returned):
        chain = _Chain(program, kinds, user_inputs, places, written)
        is_view = isinstance(item, fx.Node) and chain.follow(item, place)
        views.append(chain.view() if is_view else None)
    return tuple(views)


class _Chain:
    """The views between one result and the tensors whose memory it uses."""

    def __init__(
        self,
        program: ExportedProgram,
        kinds: dict[str, Any],
        user_inputs: list[str],
        places: dict[fx.Node, int],
        written: set[fx.Node],
    ) -> None:
        self.program = program
        self.kinds, self.user_inputs, self.places, self.written = kinds, user_inputs, places, written
        self.place = -1  # of the result
        self.order: list[fx.Node] = []
        self.sources: list[tuple[fx.Node, str, Any]] = []  # a node, its kind, and its place or value

    def follow(self, item: fx.Node, place: int) -> bool:
        """Whether the result at `place` uses the memory of an input, a weight or another result."""
        self.place, own = place, _unchanged(item)
        if own.op == "placeholder" and self._is_input(own) and own not in self.written:
            return False  # an input itself: `GraphOutput.is_input`
        if own.op != "placeholder" and alias_of(own) is None and self.places[own] == place:
            return False  # a tensor of its own
        return self._tensor(own)

    def _tensor(self, node: fx.Node) -> bool:
        node = _unchanged(node)
        if node in self.order or any(node is source for source, _, _ in self.sources):
            return True
        if node.op == "placeholder":
            return self._source(node)
        before = [*self.order], [*self.sources]
        if self._view_of(node, alias_of(node)):
            return True
        self.order, self.sources = before
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
            return False  # the strides of an engine's result differ
        self.order.append(node)
        return not (may_copy(node) and self._root_is_written())

    def _source(self, node: fx.Node) -> bool:
        if self._is_input(node):
            self.sources.append((node, "input", self.user_inputs.index(node.name)))
            return True
        spec = self.kinds[node.name]
        tensor = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or not isinstance(tensor, torch.Tensor):
            return False  # every call makes a constant in the model's code again
        self.sources.append((node, "held", tensor))
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
    """The tensor itself: the result of an in-place operator is the tensor that it changed."""
    base = alias_of(node) if changes(node) else None
    return node if base is None else _unchanged(base)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The tensors that the model changes in place, directly or through a view."""
    tensors: set[fx.Node] = set()
    for node in graph.nodes:
        for argument in written_arguments(node):
            base: fx.Node | None = argument
            while base is not None:
                tensors.add(base)
                base = alias_of(base)
    return tensors


def returned_by(program: ExportedProgram) -> list[Any]:
    """The user's results: nodes and plain values."""
    output = program.graph.output_node()
    pairs = zip(program.graph_signature.output_specs, output.args[0], strict=True)
    return [item for spec, item in pairs if spec.kind is OutputKind.USER_OUTPUT]


# The memory layout of results: in rows, channels_last, or transposed.
#
# Engines return rows. Code that calls `view` on a result, or reads its strides, works with those of PyTorch's
# result, so results get the same layout. This copies a result whose layout differs. In the zoo, only
# ConvNeXt's does (150 kB).

Order = tuple[int, ...]  # the axes of a tensor, from the longest stride to the shortest
_LAST: dict[int, Order] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}  # of images, by their dimensions


@dataclass(frozen=True)
class Layouts:
    """The order of each of the user's results, None if it is not known, and the inputs that are images.

    `images` has the place of each image in the flat call, and whether it had channels last in the example.
    The layouts of convolutions follow it: `others` are the orders for a call whose images have the other
    layout.
    """

    orders: tuple[Order | None, ...] = ()
    images: tuple[tuple[int, bool], ...] = ()
    others: tuple[Order | None, ...] = ()

    def follow(self, flat: Sequence[Any]) -> bool | None:
        """Whether the images of a call have the example's layout; None if only some have."""
        same = {has_channels_last(flat[place]) == last for place, last in self.images}
        return None if len(same) > 1 else same != {False}

    def as_returned(
        self, results: Sequence[Any], call: Any, answer: Callable[[Any], Sequence[Any] | None]
    ) -> Layouts:
        """The layouts of what the model returned for a call; `answer` runs the model.

        Those of a captured program come from fake tensors, which do not follow every kernel: an eager
        convolution of a slice of a tensor in channels_last returns rows on x86 (torch 2.13), as in SegFormer.
        """
        orders = self._orders_of(results)
        if orders == self.orders:
            return self
        flat, structure = pytree.tree_flatten(call)
        other = answer(pytree.tree_unflatten(self.swapped(flat), structure)) if self.others else None
        return replace(self, orders=orders, others=() if other is None else self._orders_of(other))

    def _orders_of(self, results: Sequence[Any]) -> tuple[Order | None, ...]:
        """The orders of results that the model returned, where the graph has an order."""
        pairs = zip(results, self.orders, strict=False)
        return tuple(None if order is None else layout_of(result) for result, order in pairs)

    def swapped(self, flat: Sequence[Any]) -> list[Any]:
        """A call whose images have the layout that they do not have in the example."""
        last = dict(self.images)
        return [_swapped(x, last[place]) if place in last else x for place, x in enumerate(flat)]


IN_ROWS = Layouts()


def output_layouts(program: ExportedProgram) -> Layouts:
    """The memory layouts of a captured program's results."""
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
    """The orders of the results if images have the other layout, from a run on fake tensors."""
    graph = fx.Interpreter(program.graph_module, garbage_collect_values=False)
    try:
        with FakeTensorMode(), torch.no_grad():
            placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
            graph.run(*(_sized(node.meta.get("val"), node in images) for node in placeholders))
        return tuple(layout_of(graph.env.get(item)) for item in results)
    except Exception:  # an operator needs values: images in the other layout are copied to the example's
        return ()


def _sized(value: Any, has_other_layout: bool) -> Any:
    """A tensor of the same sizes without values, or a number."""
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes, steps = ([_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    tensor = torch.empty_strided(sizes, steps, dtype=value.dtype, device=value.device)
    if not has_other_layout:
        return tensor
    return _swapped(tensor, has_channels_last(value))


def _swapped(image: torch.Tensor, has_last: bool) -> Any:
    return laid_out(image, tuple(range(image.dim())) if has_last else _LAST[image.dim()])


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in _LAST


def has_channels_last(value: Any) -> bool:
    """Whether an image has channels last, and not rows.

    >>> has_channels_last(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    True
    """
    return _is_image(value) and layout_of(value) == _LAST[value.dim()]


def layout_of(value: Any) -> Order | None:
    """The order of a tensor's axes in memory; None if elements share memory, or there are none.

    For sizes that vary, it is the order in the example. Axes of one element are where rows have them.

    >>> layout_of(torch.empty(2, 3, 4, 4, memory_format=torch.channels_last))
    (0, 2, 3, 1)
    >>> rows = torch.empty(2, 3)
    >>> layout_of(rows.t()), layout_of(rows), layout_of(rows[:, :1].expand(2, 4))
    ((1, 0), (0, 1), None)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, steps = ([_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if 0 in sizes:  # it is empty, or its size is unknown
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
    """The same values, with the axes in this order in memory.

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
    """Whether an order is row-major."""
    return order == tuple(range(len(order)))


def _inverse(order: Sequence[int]) -> Order:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _hint(size: int | torch.SymInt) -> int:
    """A size, or the example's; 0 if it is not known before the model runs."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return hint if isinstance(hint, int) else 0

"""What was done to a network while a journal was kept, so that it can be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import onnx_ir as ir

from intarsia.network.bodies import Read, outer_reads, own_body

if TYPE_CHECKING:
    from intarsia.network.network import Network
    from intarsia.network.signature import Call, FLayerInfo


class Added(NamedTuple):
    """A layer was added; `inferred` if its outputs' types come from the operator's own rule."""

    node: ir.Node
    inferred: bool


class Owned(NamedTuple):
    """A layer that was added took over the body of another, or of none."""

    body: ir.Graph
    before: ir.Node | None


class Removed(NamedTuple):
    """A layer was taken out."""

    node: ir.Node
    inputs: tuple[ir.Value | None, ...]
    label: int
    info: FLayerInfo | Call | None
    released: tuple[Read, ...]  # what its bodies read
    behind: ir.Node | None  # what stood behind it; itself where that is not known


class Moved(NamedTuple):
    """The readers of `old` were given `new`; `outputs` are positions among the network's outputs."""

    old: ir.Value
    new: ir.Value
    uses: tuple[tuple[ir.Node, int], ...]
    outputs: tuple[int, ...]
    swapped_names: bool


class Redirected(NamedTuple):
    """One layer reads `new` where it read `old`."""

    node: ir.Node
    slot: int
    old: ir.Value | None
    new: ir.Value


class Recorded(NamedTuple):
    """A signature was changed; it said `call` and `outputs`, as they were named at `time`."""

    info: FLayerInfo
    call: tuple[Any, ...]
    outputs: Any
    time: int


class Constant(NamedTuple):
    """A constant was added, shared under `key` if it is small."""

    value: ir.Value
    key: Any


class Given(NamedTuple):
    """An input was added."""

    value: ir.Value


class Marked(NamedTuple):
    """A tensor was made an output; `name` is what it was called before."""

    value: ir.Value
    name: str | None


class Typed(NamedTuple):
    """A tensor got another type or shape."""

    value: ir.Value
    type: ir.TypeProtocol | None
    shape: ir.Shape | None


class Ordered(NamedTuple):
    """The layers stood like this, with these labels, before their order or labels changed."""

    nodes: list[ir.Node]
    labels: dict[ir.Node | None, int]
    lows: dict[ir.Node, int]


# A journal holds each edit as a plain tuple, which costs a fifth: its class, then its fields.
Edit = tuple[Any, ...]


def undo(net: Network, edits: list[Edit]) -> None:
    """Take back these edits, the last first; the network is then as it was, names and places included."""
    back: list[tuple[int, ir.Node]] = []
    for kind, *fields in reversed(edits):
        edit = kind(*fields)
        if isinstance(edit, Added):
            _take_out(net, edit.node)
        elif isinstance(edit, Removed):
            edit.node.resize_inputs(len(edit.inputs))
            for index, value in enumerate(edit.inputs):
                edit.node.replace_input_with(index, value)
            for inner, index, value in edit.released:
                inner.replace_input_with(index, value)
            net.restored(edit.node, edit.info)
            if edit.behind is edit.node:
                net.graph.append(edit.node)
                back.append((edit.label, edit.node))
                continue
            net.order.restored(edit.node, edit.label)
            if edit.behind is None:
                net.graph.append(edit.node)
            else:
                net.graph.insert_before(edit.behind, edit.node)
        elif isinstance(edit, Moved):
            _move_back(net, edit)
        elif isinstance(edit, Redirected):
            edit.node.replace_input_with(edit.slot, edit.old)
            net.memo.read_moved_back(edit.node)
        elif isinstance(edit, Owned):
            own_body(edit.body, edit.before)
        elif isinstance(edit, Recorded):
            edit.info.say(edit.call, edit.outputs, edit.time)
        elif isinstance(edit, Constant):
            net.graph.initializers.pop(str(edit.value.name))
            net.forget_constant(edit.key)
        elif isinstance(edit, Given):
            net.graph.inputs.remove(edit.value)
        elif isinstance(edit, Marked):
            net.graph.outputs.pop()
            edit.value.name = edit.name
        elif isinstance(edit, Ordered):
            _order_again(net, edit)
            back.clear()
        else:
            edit.value.type, edit.value.shape = edit.type, edit.shape
    back = [(label, node) for label, node in back if node.graph is net.graph]
    _put_back(net, back)
    for label, node in back:
        net.order.restored(node, label)


def _take_out(net: Network, node: ir.Node) -> None:
    for inner, index, _ in outer_reads(node, owned=True):
        inner.replace_input_with(index, None)
    node.resize_inputs(0)
    net.graph.remove(node)
    net.forget_layer(node)


def _move_back(net: Network, edit: Moved) -> None:
    if edit.swapped_names:
        edit.old.name, edit.new.name = edit.new.name, edit.old.name
    for position in edit.outputs:
        net.graph.outputs[position] = edit.old
    for node, index in edit.uses:
        node.replace_input_with(index, edit.old)
    net.memo.uses_moved_back(edit.old)


def _order_again(net: Network, edit: Ordered) -> None:
    """Bring the layers that are in the network into the order they had."""
    nodes = [node for node in edit.nodes if node.graph is net.graph]
    net.graph.remove(nodes)
    net.graph.extend(nodes)
    net.order.labelled(edit.labels, edit.lows)


def _put_back(net: Network, back: list[tuple[int, ir.Node]]) -> None:
    """Restored layers stand at the end: bring each to where its label says it stood."""
    if not back:
        return
    waiting = dict(back)
    restored = {node for _, node in back}
    labels = sorted(waiting, reverse=True)
    for node in list(net.graph):
        if node in restored:
            continue
        label = net.order.labels.get(node, 0)
        while labels and labels[-1] < label:
            moved = waiting[labels.pop()]
            net.graph.remove(moved)
            net.graph.insert_before(node, moved)
    while labels:  # those that stood last, in their order
        moved = waiting[labels.pop()]
        net.graph.remove(moved)
        net.graph.append(moved)

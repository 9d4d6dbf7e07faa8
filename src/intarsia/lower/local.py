"""Local changes of a captured graph, instead of tracing it again: writes to fresh memory, single operators.

`run_decompositions` traces the whole program again, which takes longer than the export. A `diff` in a mask,
or `hidden += residual` on a fresh result, would have ResNet-50, GPT-2 and Llama traced twice. Everything less
simple (views, varying sizes, complex numbers) is traced again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import NodeSource
from torch.utils import _pytree as pytree

from intarsia.lower.lowered import note_replaced

aten = torch.ops.aten

# In-place operators, and the same without the write.
_AS_VALUES = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.relu_.default: aten.relu.default,
}
# Operators whose results have memory of their own and keep no reference to their inputs. They are listed,
# since some composite operators, such as dropout, may return their input and do not declare it.
_FRESH = frozenset(
    {
        *_AS_VALUES.values(),
        aten.batch_norm.default,
        aten.bmm.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.convolution.default,
        aten.embedding.default,
        aten.gelu.default,
        aten.layer_norm.default,
        aten.linear.default,
        aten.max_pool2d.default,
        aten.mm.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.softmax.int,
        aten.tanh.default,
    }
)


def settle(graph: fx.Graph, table: dict[Any, Any], needs_work: Callable[[fx.Node], bool]) -> bool:
    """Change the nodes that need work one by one; False if one of them needs the whole program traced again.

    The changes before that one are correct on their own.
    """
    with torch.no_grad():
        changed = all(
            _is_removed(node) or _is_out_of_place(node) or _is_expanded(node, table)
            for node in list(graph.nodes)
            if needs_work(node)
        )
    graph.lint()
    return changed


def _is_removed(node: fx.Node) -> bool:
    """Remove a `detach_`, which affects gradients alone and returns its input; whether it was one."""
    if node.target is not aten.detach_.default or any(user.op == "output" for user in node.users):
        return False
    (source,) = node.all_input_nodes
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    return True


def _is_out_of_place(node: fx.Node) -> bool:
    """Replace a write to memory that no other value shares by a new value; whether that was possible."""
    value = _AS_VALUES.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    written = node.args[0] if node.args else None
    if value is None or not isinstance(written, fx.Node) or written.target not in _FRESH:
        return False
    if any(user is not node and user.target not in _FRESH for user in written.users):
        return False  # the reader may be a view of it, or return it
    tensor = written.meta.get("val")
    others = [x.meta.get("val") for x in node.all_input_nodes]
    if not isinstance(tensor, torch.Tensor) or not all(
        isinstance(x, torch.Tensor) and x.dtype == tensor.dtype for x in others
    ):
        return False
    rest = (*node.args[1:], *node.kwargs.values())
    if any(not isinstance(x, fx.Node) for x in rest) and not tensor.is_floating_point():
        return False  # the result may have another dtype than the tensor that is written to
    note_replaced(node, [node.target])
    node.target = value
    after = dict.fromkeys(_following(node))
    written.replace_all_uses_with(node, delete_user_cb=lambda user: user in after)
    return True


def _following(node: fx.Node) -> list[fx.Node]:
    later, at = [], node.next
    while at.op != "root":
        later.append(at)
        at = at.next
    return later


def _is_expanded(node: fx.Node, table: dict[Any, Any]) -> bool:
    """Replace an operator of constant sizes by the operators it decomposes to; whether that was possible."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    results = [node, *(user for user in node.users if user.target is operator.getitem)]
    if any(user.op == "output" for result in results for user in result.users):
        return False  # the program refers to its results by name
    operands = node.all_input_nodes
    fakes = [argument.meta.get("val") for argument in operands]
    if not all(_is_plain(fake) for fake in (*fakes, node.meta.get("val"))):
        return False
    traced = _traced(node, fakes, table)
    if traced is None:
        return False
    copies: dict[fx.Node, Any] = {}
    inputs = iter(operands)
    with node.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(inputs)
            elif inner.op == "call_function":
                copy = node.graph.node_copy(inner, copies.__getitem__)
                source = NodeSource(node, "intarsia.lower")  # so that its former name is known
                copy.meta = {**node.meta, "val": inner.meta.get("val"), "from_node": [source]}
                note_replaced(copy, [target])
                copies[inner] = copy
    (returned,) = traced.graph.output_node().args
    if isinstance(returned, fx.Node):
        node.replace_all_uses_with(copies[returned])
    else:
        for user in list(node.users):
            assert isinstance(returned, list | tuple)
            user.replace_all_uses_with(copies[returned[user.args[1]]])  # type: ignore[index]
            node.graph.erase_node(user)
    node.graph.erase_node(node)
    return True


def _traced(node: fx.Node, fakes: list[Any], table: dict[Any, Any]) -> fx.GraphModule | None:
    """The graph of one operator; None if it has anything but calls of operators that write nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    places = {argument: place for place, argument in enumerate(node.all_input_nodes)}
    if any(user.target is not operator.getitem for user in node.users) and not isinstance(
        node.meta.get("val"), torch.Tensor
    ):
        return None

    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: tensors[places[argument]])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    modes = [getattr(x, "fake_mode", None) for x in pytree.tree_leaves(node.meta.get("val"))]
    try:
        # An operator without operands must make fake tensors as the rest of the program.
        with modes[0] or nullcontext():
            traced = make_fx(call, decomposition_table=table)(*fakes)
    except Exception:  # tracing the whole program reports the error
        return None
    for inner in traced.graph.nodes:
        if inner.op not in ("placeholder", "call_function", "output"):
            return None
        schema = getattr(inner.target, "_schema", None)
        if inner.op == "call_function" and (schema is None or schema.is_mutable or inner.target in table):
            return None
    return traced


def _is_plain(value: Any) -> bool:
    """Whether a value is tensors of constant sizes."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(
        isinstance(x, torch.Tensor)
        and not x.is_complex()
        and all(isinstance(size, int) for size in (*x.shape, *x.stride()))
        for x in leaves
    )

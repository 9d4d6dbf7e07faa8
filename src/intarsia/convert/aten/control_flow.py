"""`torch.cond` and `torch.while_loop`: the layers `If` and `Loop`, whose bodies are networks of their own.

Loops of many short iterations gain most: 64 iterations of an RNN cell of 64 units take 3.4 ms in PyTorch and
0.5 ms in one `Loop` of ONNX Runtime (`bench/control_flow.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from intarsia.convert.context import Context, ConversionContext
from intarsia.convert.interpreter import convert_graph, mark_outputs, shape_of
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.graph.nodes import is_control_flow
from intarsia.network import Network, Shape, Tensor, dtypes, net_guard
from intarsia.network.serialize import INLINE_BYTES


@converter(torch.ops.higher_order.cond)
def cond(
    ctx: Context,
    pred: Any,
    true_graph: fx.GraphModule,
    false_graph: fx.GraphModule,
    operands: Sequence[Any] = (),
) -> list[Tensor]:
    """`If`; its branches read the operands where they are."""
    if not isinstance(pred, Tensor):
        raise ConversionError(f"the condition is a {type(pred).__name__}, not a tensor")
    _refuse_nested(true_graph, false_graph)

    def branch(name: str, graph: fx.GraphModule) -> ir.Graph:
        return _body(ctx, name, lambda inner, _: convert_graph(inner, graph, operands))

    branches = {
        "then_branch": branch("then_branch", true_graph),
        "else_branch": branch("else_branch", false_graph),
    }
    layer = ctx.net.add_layer("If", [pred], branches, outputs=_results(ctx))
    return layer.get_outputs()


@converter(torch.ops.higher_order.while_loop)
def while_loop(
    ctx: Context,
    more: fx.GraphModule,
    turn: fx.GraphModule,
    carried: Sequence[Any],
    operands: Sequence[Any] = (),
) -> list[Tensor]:
    """`Loop`: the condition is computed before it, and at the end of each iteration."""
    _refuse_nested(more, turn)
    first, results = [ctx.tensor(value) for value in carried], _results(ctx)
    if [value.dtype for value in first] != [dtype for dtype, _ in results]:
        raise ConversionError("a value that the loop carries changes its dtype")
    [start] = convert_graph(_inner(ctx, ctx.net), more, [*first, *operands])
    ctx.net.scope = ctx.name

    def layers(inner: ConversionContext, body: Network) -> list[Any]:
        body.add_input(body.unique_name("turn"), ir.DataType.INT64, ())
        body.add_input(body.unique_name("more"), ir.DataType.BOOL, ())
        taken = [body.add_input(body.unique_name("carried"), dtype, shape) for dtype, shape in results]
        made = [inner.tensor(value) for value in convert_graph(inner, turn, [*taken, *operands])]
        return [*convert_graph(inner, more, [*made, *operands]), *made]

    body = _body(ctx, "body", layers)
    layer = ctx.net.add_layer("Loop", [None, ctx.tensor(start), *first], {"body": body}, outputs=results)
    return layer.get_outputs()


def _results(ctx: Context) -> list[tuple[ir.DataType, Shape]]:
    values = ctx.value
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise ConversionError("it returns values that are not tensors")
    return [(dtypes.to_onnx(value.dtype), shape_of(value)) for value in values]


def _refuse_nested(*bodies: fx.GraphModule) -> None:
    if any(is_control_flow(node) for body in bodies for node in body.graph.nodes):
        raise ConversionError("nested control flow runs in PyTorch; its bodies run on engines")


def _body(ctx: Context, name: str, layers: Callable[[ConversionContext, Network], list[Any]]) -> ir.Graph:
    """The graph of a body; large constants that it makes belong to the network around it."""
    body = Network(ctx.net.unique_name(name), within=ctx.net)
    inner = _inner(ctx, body)
    with net_guard(body):
        mark_outputs(body, layers(inner, body))
    body.drop_unused_constants()
    for key, value in list(body.graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > INLINE_BYTES:
            ctx.net.graph.register_initializer(body.graph.initializers.pop(key))
    ctx.reads_engine |= inner.reads_engine
    return body.graph


def _inner(ctx: Context, net: Network) -> ConversionContext:
    return ConversionContext(net, notes=ctx.notes, for_engine=ctx.for_engine)

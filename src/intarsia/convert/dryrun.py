"""Trial conversions: whether a node converts is found by converting it, and remembered by its signature."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import fx

from intarsia.convert.context import ConversionContext
from intarsia.convert.interpreter import NodeError, add_input, convert_node, dim_of, shape_of
from intarsia.convert.registry import registry
from intarsia.errors import IntarsiaError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

Signature = tuple[Any, ...]

_SMALL = 64  # a constant of so few elements may steer a converter by its value
_REMEMBERED = 10_000
_memo: OrderedDict[Signature, Network | str] = OrderedDict()
_lock = threading.Lock()


def dry_convert(
    node: fx.Node, constants: dict[fx.Node, Any], signature: Signature, engine: Any = None
) -> Network | str:
    """The scratch network a node converts to, or the reason it does not.

    Engines share it, unless a converter asks its context for the engine.
    """
    for_all = (registry.version, signature)
    for_one = (*for_all, None if engine is None else engine.key())
    outcome = _memo.get(for_all, _memo.get(for_one))
    if outcome is None:
        ctx = ConversionContext(Network("probe"), for_engine=engine)
        outcome = _trial(ctx, node, constants)
        with _lock:
            _memo[for_one if ctx.reads_engine else for_all] = outcome
            if len(_memo) > _REMEMBERED:
                _memo.popitem(last=False)
    return outcome


def signature_of(node: fx.Node, constants: dict[fx.Node, Any]) -> Signature:
    """Equal for nodes that any converter treats alike: target, arguments, dtypes, shapes, small constants."""
    return (node.target, _describe(node.args, constants), _describe(node.kwargs, constants))


def _describe(value: Any, constants: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        if value in constants:
            return _describe_constant(constants[value])
        return _describe_value(value.meta.get("val"))
    if isinstance(value, list | tuple):
        return tuple([_describe(item, constants) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _describe(item, constants)) for key, item in value.items()])
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return (value.__class__, value)  # 1, 1.0 and True are equal, yet not alike


def _describe_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device.type, shape_of(value))
    if isinstance(value, torch.SymInt):
        return ("size", dim_of(value))
    return (value.__class__, str(value))


def _describe_constant(value: Any) -> Any:
    if isinstance(value, fx.GraphModule):  # a body of control flow
        inner = [node for node in value.graph.nodes if node.op != "output"]
        return ("graph", value.code, tuple([_describe_value(node.meta.get("val")) for node in inner]))
    if not isinstance(value, torch.Tensor):
        return ("object", id(value))
    if value.layout is not torch.strided:
        return ("constant", value.layout, id(value))
    if value.numel() <= _SMALL and value.device.type == "cpu" and value.dtype is not torch.bfloat16:
        return ("constant", value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    # Integers and booleans index: their values may decide. Floating weights never do.
    identity = None if value.is_floating_point() else value.data_ptr()
    return ("constant", value.dtype, tuple(value.shape), identity)


def _trial(ctx: ConversionContext, node: fx.Node, constants: dict[fx.Node, Any]) -> Network | str:
    values: dict[fx.Node, Any] = {}
    try:
        with net_guard(ctx.net):
            for source in node.all_input_nodes:
                if source in constants:
                    values[source] = constants[source]
                else:
                    values[source] = _input(ctx.net, f"x{len(values)}", source.meta.get("val"))
            result = convert_node(ctx, node, values)
            for item in result if isinstance(result, list | tuple) else [result]:
                if isinstance(item, Tensor):
                    produced = item.value.producer() is not None and not item.is_output()
                    (item if produced else F.identity(item)).mark_output()
    except NodeError as error:
        return error.reason
    except IntarsiaError as error:
        return str(error)
    return ctx.net


def _input(net: Network, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_input(net, f"{name}_{i}", item) for i, item in enumerate(value))
    if isinstance(value, bool | int | float):
        return value
    return add_input(net, name, value)

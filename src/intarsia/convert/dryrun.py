"""Asking whether a node converts: a trial conversion into a scratch network, remembered by signature."""

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
_memo: OrderedDict[tuple[int, Signature], Network | str] = OrderedDict()
_lock = threading.Lock()


def dry_convert(node: fx.Node, constants: dict[fx.Node, Any], signature: Signature) -> Network | str:
    """The scratch network a node converts to, or the reason it does not."""
    key = (registry.version, signature)
    found = _memo.get(key)
    if found is None:
        found = _try(node, constants)
        with _lock:
            _memo[key] = found
            if len(_memo) > _REMEMBERED:
                _memo.popitem(last=False)
    return found


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
    if not isinstance(value, torch.Tensor):
        return ("object", id(value))
    if value.layout is not torch.strided:
        return ("constant", value.layout, id(value))
    if value.numel() <= _SMALL and value.device.type == "cpu" and value.dtype is not torch.bfloat16:
        return ("constant", value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    # Integers and booleans index: their values may decide. Floating weights never do.
    identity = None if value.is_floating_point() else value.data_ptr()
    return ("constant", value.dtype, tuple(value.shape), identity)


def _try(node: fx.Node, constants: dict[fx.Node, Any]) -> Network | str:
    net = Network("probe")
    values: dict[fx.Node, Any] = {}
    try:
        with net_guard(net):
            for source in node.all_input_nodes:
                if source in constants:
                    values[source] = constants[source]
                else:
                    values[source] = _input(net, f"x{len(values)}", source.meta.get("val"))
            result = convert_node(ConversionContext(net), node, values)
            for made in result if isinstance(result, list | tuple) else [result]:
                if isinstance(made, Tensor):
                    produced = made.value.producer() is not None and not made.is_output()
                    (made if produced else F.identity(made)).mark_output()
    except NodeError as error:
        return error.reason
    except IntarsiaError as error:
        return str(error)
    return net


def _input(net: Network, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_input(net, f"{name}_{i}", item) for i, item in enumerate(value))
    if isinstance(value, bool | int | float):
        return value
    return add_input(net, name, value)

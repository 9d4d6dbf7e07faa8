"""Walks a piece of the graph and calls its converters: FX nodes in, a Network out; tries single nodes."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from intarsia.convert.context import ConversionContext
from intarsia.convert.evaluators import EVALUATORS, evaluate
from intarsia.convert.registry import registry
from intarsia.errors import ConversionError, IntarsiaError
from intarsia.graph.nodes import origin_of
from intarsia.network import Dim, Network, Shape, Tensor, dtypes, net_guard
from intarsia.network import functional as F
from intarsia.quantized import EMBEDDING, INTEGER_LINEAR, LINEAR

aten = torch.ops.aten
# Why operators have no converter, if that is known. The order of packed weights differs between processors.
_NOT_CONVERTED: dict[Any, str] = {
    aten._weight_int4pack_mm_for_cpu.default: "its weight in 4 bits is packed for PyTorch's own kernel",
}
# torch refuses their indices out of range even where no element is computed.
_CHECKS_INDICES = frozenset(
    {aten.embedding.default, aten.index_reduce.default, aten.index_select.default, aten.narrow.Tensor}
)


class NodeError(ConversionError):
    """A node that could not be converted; `node` is the faulty one."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node.name} ({node.target}): {reason}")
        self.node = node
        self.reason = reason


def convert(
    module: fx.GraphModule, name: str = "network", notes: list[str] | None = None, engine: Any = None
) -> Network:
    """The network of a graph of core ATen; NodeError names a node that cannot be converted.

    `notes` receives an entry if a user's converter failed and another one was used instead. Converters may
    ask for the `engine` that the network is made for.
    """
    net = Network(name)
    ctx = ConversionContext(net, for_engine=engine)
    with net_guard(net):
        taken = [node for node in module.graph.nodes if node.op == "placeholder"]
        inputs = [add_input(net, node.name, node.meta.get("val")) for node in taken]
        mark_outputs(net, convert_graph(ctx, module, inputs))
    net.drop_unused_constants()  # a converter may have read a weight and made another of it
    if notes is not None:
        notes += [note for note in ctx.notes if note not in notes]
    return net


def convert_graph(ctx: ConversionContext, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Add the layers of a graph to the network of the context; what the graph returns, flat."""
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = constant_of(module, node)
        elif node.op == "call_function":
            values[node] = convert_node(ctx, node, values)
        elif node.op != "output":
            raise NodeError(node, f"a node of kind {node.op} is not handled")
    returned: Any = module.graph.output_node().args[0]
    flat = returned if isinstance(returned, list | tuple) else [returned]
    return [values[item] if isinstance(item, fx.Node) else item for item in flat]


def add_input(net: Network, name: str, value: Any) -> Tensor:
    """A network input for a tensor, or for a size that is known only when the network runs."""
    if isinstance(value, torch.Tensor):
        return net.add_input(name, value.dtype, shape_of(value))
    if isinstance(value, torch.SymInt | int):
        return net.add_input(name, ir.DataType.INT64, ())
    raise ConversionError(f"input {name} is a {type(value).__name__}, not a tensor")


def shape_of(value: torch.Tensor) -> Shape:
    """The sizes of a (fake) tensor, symbols by name."""
    return tuple(dim_of(size) for size in value.shape)


def dim_of(size: int | torch.SymInt) -> Dim:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else str(expression)


def constant_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """The value of a get_attr node: a frozen tensor, or a graph for control flow."""
    return attrgetter(str(node.target))(module)


def convert_node(ctx: ConversionContext, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Convert one node, trying its converters in order; the result has torch's dtypes and shapes."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    ctx.node, ctx.name, ctx.net.scope = node, node.name, node.name
    ctx.net.origin = origin_of(node)
    if node.target in EVALUATORS:
        try:
            return evaluate(ctx, node, tuple(args))
        except IntarsiaError as error:
            raise NodeError(node, str(error)) from error
        except Exception as error:  # an author's mistake must cost this node, not the model
            raise NodeError(node, f"its evaluator failed: {type(error).__name__}: {error}") from error
    if node.target in registry and (empty := _empty_result(node)) is not None:
        if _checks_indices(node):
            raise NodeError(node, "its result has no elements, but torch refuses indices out of range")
        return empty
    reasons: list[str] = []
    passed_over: list[str] = []  # converters of users that were asked first and did not take it
    for candidate in registry.converters(node.target):
        reason = candidate.refuses(node)
        if reason is None:
            try:
                result = stamp(node, candidate.convert(ctx, tuple(args), dict(kwargs)))
                instead = f"the converter {candidate.name} takes it"
                ctx.notes += [f"{refusal}; {instead}" for refusal in passed_over]
                return result
            except IntarsiaError as error:
                reason = str(error)
            except Exception as error:  # an author's mistake must cost this node, not the model
                reason = f"the converter {candidate.name} failed: {type(error).__name__}: {error}"
        reasons.append(reason)
        if not candidate.shipped:
            passed_over.append(
                f"the converter {candidate.name} does not take {node.name} ({node.target}): {reason}"
            )
    raise NodeError(node, "; ".join(reasons) or _NOT_CONVERTED.get(node.target, "no converter"))


def _empty_result(node: fx.Node) -> Any:
    """A result without elements, made from its shape alone; engines fail on empty tensors.

    Of several results it is those that are read; None if one of them has elements.
    """
    value = node.meta.get("val")
    if not isinstance(value, list | tuple):
        return _empty_tensor(value)
    items = [_empty_tensor(item) for item in value]
    read = [user.args[1] if user.target is operator.getitem else None for user in node.users]
    is_empty = bool(read) and all(isinstance(place, int) and items[place] is not None for place in read)
    return tuple(items) if is_empty or (items and None not in items) else None


def _empty_tensor(value: Any) -> Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    shape = shape_of(value)
    if 0 not in shape or not all(isinstance(dim, int) for dim in shape):
        return None
    return F.full([int(dim) for dim in shape], 0, value.dtype)  # type: ignore[arg-type]


def _checks_indices(node: fx.Node) -> bool:
    """Whether torch checks indices although there is nothing to compute."""
    if node.target not in _CHECKS_INDICES:
        return False
    values = [arg.meta.get("val") for arg in node.args[1:] if isinstance(arg, fx.Node)]
    return any(isinstance(v, torch.Tensor) and not v.is_floating_point() and 0 not in v.shape for v in values)


def stamp(node: fx.Node, result: Any) -> Any:
    """Check a converter's result against what torch makes, and give it torch's symbolic shape."""
    expected = node.meta.get("val")
    if isinstance(expected, list | tuple):
        if not isinstance(result, list | tuple) or len(result) != len(expected):
            raise ConversionError(
                f"the converter returned {_count(result)} results where torch returns {len(expected)}"
            )
        return tuple(
            None if item is None else _stamp_one(item, value)
            for item, value in zip(result, expected, strict=True)
        )
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    return _stamp_one(result, expected)


def _stamp_one(result: Any, expected: Any) -> Any:
    if not isinstance(expected, torch.Tensor):
        return result
    if isinstance(result, torch.Tensor):
        result = F.constant(result)
    if not isinstance(result, Tensor):
        raise ConversionError(f"the converter returned a {type(result).__name__}, not a tensor")
    dtype = dtypes.to_onnx(expected.dtype)
    if result.dtype != dtype:
        raise ConversionError(f"the converter returned {result.dtype.name} where torch returns {dtype.name}")
    shape = shape_of(expected)
    have = result.shape
    if len(have) != len(shape):
        raise ConversionError(
            f"the converter returned {len(have)} dimensions where torch returns {len(shape)}"
        )
    for size, expected_size in zip(have, shape, strict=True):
        if isinstance(size, int) and isinstance(expected_size, int) and size != expected_size:
            raise ConversionError(f"the converter returned shape {have} where torch returns {shape}")
    if have != shape and result.value.producer() is not None:
        result.value.shape = ir.Shape(shape)
    return result


def _count(result: Any) -> str:
    return str(len(result)) if isinstance(result, list | tuple) else "1"


def mark_outputs(net: Network, returned: Sequence[Any]) -> None:
    """Mark the outputs of a graph; a value without a layer here, or returned twice, gets an Identity."""
    net.scope, net.origin = "", None
    marked: set[ir.Value] = set()
    for index, item in enumerate(returned):
        value = item if isinstance(item, Tensor) else F.constant(item)
        producer = value.value.producer()
        if value.value in marked or producer is None or producer.graph is not net.graph:
            net.scope = f"output_{index}"
            value = F.identity(value)
        marked.add(value.value)
        net.mark_output(value)


# Trial conversions: whether a node converts is found by converting it, and remembered by its signature.

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
    if node.target in (LINEAR, EMBEDDING, INTEGER_LINEAR):  # no converter reads the numbers of their weights
        inputs = {source: constants[source] for source in node.all_input_nodes if source in constants}
        constants = {source: value.to("meta") for source, value in inputs.items()}
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

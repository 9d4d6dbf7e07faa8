"""The passes over a lowered graph, in the order they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from intarsia.errors import LoweringError
from intarsia.lower.integer_products import find_integer_products
from intarsia.lower.lowered import note_replaced
from intarsia.lower.masks import simplify_masks
from intarsia.lower.packing import pack_weights
from intarsia.lower.purity import dequantizes, is_pure, is_pure_operator, is_view_op

aten = torch.ops.aten
Pass = Callable[[fx.GraphModule], None]
PASSES: list[Pass] = []


def lowering_pass(function: Pass) -> Pass:
    """Add a pass at the end of the list. It edits the graph in place and must not change its results."""
    if any(function.__name__ == other.__name__ for other in PASSES):
        raise LoweringError(f"a lowering pass named {function.__name__} is registered already")
    PASSES.append(function)
    return function


def run_passes(module: fx.GraphModule) -> None:
    """Run all passes once, in order. The error of a pass that breaks the graph names the pass."""
    for function in PASSES:
        function(module)
        try:
            module.graph.lint()
        except RuntimeError as error:
            raise LoweringError(f"the lowering pass {function.__name__} broke the graph: {error}") from error
    module.recompile()


# `as_strided` reads memory by strides. Engines have strides of their own, so it is made to read the traced
# layout.


@lowering_pass
def pin_strides(module: fx.GraphModule) -> None:
    """Make every `as_strided` read a flat vector with the elements of its base in the traced order.

    as_strided(view of base, size, stride, offset) = as_strided(flat, size, stride, offset), where flat is the
    base with its dimensions in the order of memory, as one row. An input that is read this way must have the
    strides of the trace: `module.meta["strides"]` has them, and calls check them.
    """
    module.meta["strides"] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is aten.as_strided.default:
            _pin(module, node)


def _pin(module: fx.GraphModule, node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    traced = source.meta["val"]
    argument: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    offset = traced.storage_offset() if argument is None else argument
    base, views = source, []
    while isinstance(base.target, torch._ops.OpOverload) and is_view_op(base.target):
        views.append(base.target)
        base = base.args[0]  # type: ignore[assignment]
    value = base.meta["val"]
    order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))
    packed = value.permute(order)
    if not packed.is_contiguous() or value.storage_offset() != 0:
        raise LoweringError(
            f"as_strided over {base.name}, whose elements are not contiguous (strides {value.stride()}),"
            " cannot be compiled: the memory between them is unknown"
        )
    if base.op == "placeholder":
        module.meta["strides"][base.name] = tuple(value.stride())
    with module.graph.inserting_before(node):
        ordered = module.graph.call_function(aten.permute.default, (base, order))
        ordered.meta = {**base.meta, "val": packed}
        flat = module.graph.call_function(aten.reshape.default, (ordered, [-1]))
        flat.meta = {**base.meta, "val": packed.reshape(-1)}
        note_replaced(ordered, views)
    node.args = (flat, node.args[1], node.args[2], offset)
    node.kwargs = {}


# Nodes that return their input.

_IDENTITY = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.lift.default,
        aten.contiguous.default,
        aten.detach_copy.default,
        aten.alias_copy.default,
    }
)
_COPIES = frozenset(
    {aten.clone.default, aten.lift_fresh_copy.default, aten.detach_copy.default, aten.alias_copy.default}
)
_CHECKS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)


@lowering_pass
def remove_checks(module: fx.GraphModule) -> None:
    """Remove assertions on sizes and dtypes, since a compiled module checks these at every call.

    Assertions of the model on values (`torch._check` of an `item()`, `torch._assert_async`) stay.
    """
    for node in reversed(module.graph.nodes):
        if node.op != "call_function" or node.target not in _CHECKS:
            continue
        if node.target is not aten._assert_scalar.default or not _reads_a_value(node):
            module.graph.erase_node(node)


_ASSERTIONS = (aten._assert_scalar.default, aten._assert_async.default, aten._assert_async.msg)
_ITEMS = (aten.item.default, aten._local_scalar_dense.default)


def _reads_a_value(node: fx.Node) -> bool:
    """Whether a number is computed from an element of a tensor, and not from sizes alone."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if node.target in _ITEMS:
            return True
        # A size that depends on data, such as nonzero's, is in its range by construction.
        for source in node.all_input_nodes:
            if source not in seen and not isinstance(source.meta.get("val"), torch.Tensor):
                seen.add(source)
                waiting.append(source)
    return False


@lowering_pass
def remove_identities(module: fx.GraphModule) -> None:
    """Remove detach, alias, dropout in evaluation, casts to the same dtype, and copies."""
    output = module.graph.output_node()
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _is_identity(node):
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        # A returned copy of an input stays a copy, since the caller may write to it. If the model itself
        # writes to inputs or buffers, every copy stays.
        returned = output in node.users and source.op in ("placeholder", "get_attr")
        if node.target in _COPIES and (returned or module.meta.get("writes")):
            continue
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)


def _is_identity(node: fx.Node) -> bool:
    target = node.target
    if target in _IDENTITY or target is aten.clone.default:
        return True
    if target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
        return node.args[2] is False
    if target in _CASTS:
        source, result = node.args[0], node.meta.get("val")
        operand = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(operand, torch.Tensor) or not isinstance(result, torch.Tensor):
            return False
        return operand.dtype == result.dtype and operand.device == result.device
    return False


_CASTS = frozenset(
    {
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.to.prim_Device,
        aten._to_copy.default,
        aten.type_as.default,
    }
)


# Before constants are folded, which would unpack the integers:
lowering_pass(pack_weights)
lowering_pass(find_integer_products)


# Constant folding: values that depend on weights alone are computed once.
#
# A folded value may take this much more memory than the values it is computed from.
ALLOWANCE = 1 << 20

# Operators that repeat elements: engines broadcast without memory, but a folded value would be stored whole.
_EXPANDING = frozenset(
    {
        aten.expand.default,
        aten.expand_as.default,
        aten.broadcast_to.default,
        aten.repeat.default,
        aten.tile.default,
    }
)
_FILLING = frozenset(
    {
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.full_like.default,
        aten.empty.memory_format,
    }
)


@lowering_pass
def fold_constants(module: fx.GraphModule) -> None:
    """Replace nodes that depend on constants alone by their values, except expanded and random ones."""
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if isinstance(value, torch.Tensor):
                values[node] = value
        elif node.op == "call_function" and _foldable(node, values):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        if all(user in values for user in node.users):
            continue  # an inner value of a folded chain, which is dead once its readers are folded
        name = f"_folded_{node.name}"
        module.__dict__[name] = value
        with module.graph.inserting_before(node):
            constant = module.graph.create_node("get_attr", name)
        constant.meta = {key: item for key, item in node.meta.items() if key != "from_node"}
        node.replace_all_uses_with(constant)


def _foldable(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    if not all(source in values for source in node.all_input_nodes):
        return False
    target = node.target
    result = node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload):
        # An item of a folded tuple. Arithmetic on sizes is not constant.
        return bool(node.all_input_nodes) and target.__name__ == "getitem" if callable(target) else False
    if not is_pure_operator(target) or dequantizes(target):
        return False
    results = result if isinstance(result, list | tuple) else [result]
    if not all(isinstance(value, torch.Tensor) and _is_static(value) for value in results):
        return False
    size = sum(value.numel() * value.element_size() for value in results if isinstance(value, torch.Tensor))
    sources = sum(_bytes(values[source]) for source in node.all_input_nodes)
    if target in _EXPANDING or target in _FILLING:
        return size <= max(sources, 64)
    return size <= sources + ALLOWANCE


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(dim, int) for dim in value.shape)


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


lowering_pass(simplify_masks)


@lowering_pass
def share_equal_work(module: fx.GraphModule) -> None:
    """Replace a node that equals an earlier one by that one (common subexpressions)."""
    seen: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            key: Any = ("get_attr", node.target)
        elif node.op == "call_function" and is_pure(node):
            key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        else:
            continue
        try:
            twin = seen.setdefault(key, node)
        except TypeError:  # an argument cannot be hashed
            continue
        if twin is not node:
            node.replace_all_uses_with(twin)
            module.graph.erase_node(node)


def _freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value), tuple(_freeze(item) for item in value))
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    # 1, 1.0 and True are equal and have equal hashes, but mean different dtypes.
    return (type(value), value)


@lowering_pass
def remove_dead_code(module: fx.GraphModule) -> None:
    """Remove nodes without readers, and folded constants that no node uses."""
    module.graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or not _removable(node)
    )
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name in [
        name for name in module.__dict__ if name.startswith(("_folded_", "_packed_")) and name not in used
    ]:
        del module.__dict__[name]


def _removable(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        asserts = node.target in _ASSERTIONS
        # Without its reader, a random number is dropped, as by torch, although eager would advance the
        # generator.
        random = torch.Tag.nondeterministic_seeded in node.target.tags and not node.target._schema.is_mutable
        return (random or is_pure_operator(node.target)) and not asserts
    return True

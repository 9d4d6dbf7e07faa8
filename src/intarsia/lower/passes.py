"""FX passes in the order they run: strides, identities, constants, masks, equal work, dead code."""

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
from intarsia.lower.purity import dequantizes, is_pure, is_pure_operator

aten = torch.ops.aten
Pass = Callable[[fx.GraphModule], None]
PASSES: list[Pass] = []


def lowering_pass(function: Pass) -> Pass:
    """Add a pass at the end of the list; it edits the graph in place and keeps its answers."""
    if any(function.__name__ == other.__name__ for other in PASSES):
        raise LoweringError(f"a lowering pass named {function.__name__} is registered already")
    PASSES.append(function)
    return function


def run_passes(module: fx.GraphModule) -> None:
    """All passes once, in order; a pass that breaks the graph is named."""
    for function in PASSES:
        function(module)
        try:
            module.graph.lint()
        except RuntimeError as error:
            raise LoweringError(f"the lowering pass {function.__name__} broke the graph: {error}") from error
    module.recompile()


# `as_strided` reads memory by strides, and engines keep their own: it is pinned to the traced layout.

# These look at the memory of their first argument; a reshape may copy and so is not among them.
_VIEWS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.detach.default,
        aten.alias.default,
    }
)


@lowering_pass
def pin_strides(module: fx.GraphModule) -> None:
    """Let every `as_strided` read a flat vector that holds its base in the order it lay when traced.

    as_strided(view of base, size, stride, offset) = as_strided(flat, size, stride, offset), where flat is the
    base with its dimensions in order of memory, as one row. An input read this way must come with the
    strides it was traced with: `module.meta["strides"]` names them, and a call checks them.
    """
    module.meta["strides"] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is aten.as_strided.default:
            _pin(module, node)


def _pin(module: fx.GraphModule, node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    traced = source.meta["val"]
    given: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    offset = traced.storage_offset() if given is None else given
    base, views = source, []
    while base.op == "call_function" and base.target in _VIEWS:
        views.append(base.target)
        base = base.args[0]  # type: ignore[assignment]
    value = base.meta["val"]
    order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))
    packed = value.permute(order)
    if not packed.is_contiguous() or value.storage_offset() != 0:
        raise LoweringError(
            f"as_strided over {base.name}, whose elements do not lie side by side (strides {value.stride()}),"
            " cannot be compiled: what it reads between them is unknown"
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


# Nodes that do nothing.

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
    """Assertions of the trace on sizes and kinds of tensors, which a compiled module checks at every call.

    What the model itself asserts of values (`torch._check` of an `item()`, `torch._assert_async`) stays.
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
        # The size of a result that depends on data, such as nonzero's, is in its range by construction.
        for source in node.all_input_nodes:
            if source not in seen and not isinstance(source.meta.get("val"), torch.Tensor):
                seen.add(source)
                waiting.append(source)
    return False


@lowering_pass
def remove_identities(module: fx.GraphModule) -> None:
    """Detach, alias, dropout in evaluation, casts to the same dtype, copies whose layout nobody sees."""
    output = next(iter(reversed(module.graph.nodes)))
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _is_identity(node):
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        # A copy of an input that is returned must stay a copy, since the caller may write into it; and
        # so must every copy where the model itself writes to its inputs or buffers.
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


# Before constants are folded, which would make numbers of the integers:
lowering_pass(pack_weights)
lowering_pass(find_integer_products)


# Constant folding: what depends on weights alone is computed once, unless that would blow it up.

# A folded value may not take more memory than what it was made from, beyond this allowance.
ALLOWANCE = 1 << 20

# These repeat one element many times: an engine broadcasts for nothing, a folded copy would be stored whole.
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
    """Replace nodes whose inputs are all constant by their value; never an expanded or random one."""
    known: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if isinstance(value, torch.Tensor):
                known[node] = value
        elif node.op == "call_function" and _foldable(node, known):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    for node, value in known.items():
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        if all(user in known for user in node.users):
            continue  # an inner value of a folded chain; dead once its readers are folded
        name = f"_folded_{node.name}"
        module.__dict__[name] = value
        with module.graph.inserting_before(node):
            constant = module.graph.create_node("get_attr", name)
        constant.meta = {key: item for key, item in node.meta.items() if key != "from_node"}
        node.replace_all_uses_with(constant)


def _foldable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if not all(source in known for source in node.all_input_nodes):
        return False
    target = node.target
    result = node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload):
        # getitem of a folded tuple; arithmetic on sizes is not constant
        return bool(node.all_input_nodes) and target.__name__ == "getitem" if callable(target) else False
    if not is_pure_operator(target) or dequantizes(target):
        return False
    values = result if isinstance(result, list | tuple) else [result]
    if not all(isinstance(value, torch.Tensor) and _is_static(value) for value in values):
        return False
    size = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
    sources = sum(_bytes(known[source]) for source in node.all_input_nodes)
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
    """Common subexpressions: a node equal to an earlier one takes its value."""
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
        except TypeError:  # an argument that cannot be hashed: leave the node alone
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
    # 1, 1.0 and True are equal and hash alike, yet mean different dtypes.
    return (type(value), value)


@lowering_pass
def remove_dead_code(module: fx.GraphModule) -> None:
    """Nodes nobody reads, and attributes no node mentions."""
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
        # A random number that nobody reads still moves the generator; dropping it is what torch does too.
        random = torch.Tag.nondeterministic_seeded in node.target.tags and not node.target._schema.is_mutable
        return (random or is_pure_operator(node.target)) and not asserts
    return True

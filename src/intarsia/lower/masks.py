"""Attention masks that are not needed: one that is true everywhere is removed, a causal one becomes a flag.

Models compute their masks from positions with a dozen operators, also if the user passes none. A mask that
depends on sizes and constants alone is analyzed here, once for all engines: it is computed if its sizes are
constant, and otherwise derived for all sizes (see `index_values`).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx

from intarsia.lower.constants import Values, behind
from intarsia.lower.index_values import All, IndexValues, Known, Never, Sum
from intarsia.lower.purity import is_pure

aten = torch.ops.aten
ANDS = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)
MOST_ELEMENTS = 1 << 24  # of a mask that is computed


class MaskKind(Enum):
    """The effect of a mask."""

    ALL_TRUE = "hides nothing"
    ALL_FALSE = "hides everything"
    CAUSAL = "hides later positions"


def simplify_masks(module: fx.GraphModule) -> None:
    """Remove masks that hide nothing, and replace causal ones by `is_causal=True`."""
    values = IndexValues(module)
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.scaled_dot_product_attention.default:
            _simplify_attention(module, values, node)
        elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            # `masked_fill` fills where the mask is true, so nothing if it is false everywhere.
            if mask_kind(module, values, node.args[1]) is MaskKind.ALL_FALSE:
                _replace(node, node.args[0])
        elif node.target in ANDS:
            for one, other in (node.args, reversed(node.args)):
                if mask_kind(module, values, one) is MaskKind.ALL_TRUE:
                    _replace_expanded(node, other)
                    break
        elif node.target is aten.where.self and mask_kind(module, values, node.args[0]) is MaskKind.ALL_TRUE:
            _replace(node, node.args[1])


def _simplify_attention(module: fx.GraphModule, values: IndexValues, node: fx.Node) -> None:
    args = [*node.args, *[None, 0.0, False][len(node.args) - 3 :]]
    mask = node.kwargs.get("attn_mask", args[3])
    if mask is None or node.kwargs.get("is_causal", args[5]):
        return
    kind = mask_kind(module, values, mask)
    if kind not in (MaskKind.ALL_TRUE, MaskKind.CAUSAL):
        return
    args[3], args[4] = None, node.kwargs.get("dropout_p", args[4])
    args[5] = kind is MaskKind.CAUSAL
    node.args = tuple(args)
    node.kwargs = {name: v for name, v in node.kwargs.items() if name in ("scale", "enable_gqa")}


def _replace_expanded(node: fx.Node, by: Any) -> None:
    """Replace an `and` by its other operand, expanded without a copy.

    A mask of padding is the same for every query, and kernels read an expanded one as one row.
    """
    value, other = node.meta.get("val"), by.meta.get("val") if isinstance(by, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return
    if not value.dtype == other.dtype == torch.bool:
        return
    sizes = [_size(node, size) for size in value.shape]
    if all(size is not None for size in sizes):
        with node.graph.inserting_before(node):
            expanded = node.graph.call_function(aten.expand.default, (by, sizes))
        expanded.meta = dict(node.meta) | {"val": other.expand(value.shape)}
        node.replace_all_uses_with(expanded)


def _size(before: fx.Node, size: Any) -> Any:
    """A size as an argument: a number, or a node with that value before this one; None if there is none."""
    if isinstance(size, int):
        return size
    for node in before.graph.nodes:
        if node is before:
            return None
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return node
    return None


def _replace(node: fx.Node, by: Any) -> None:
    value, other = node.meta.get("val"), by.meta.get("val") if isinstance(by, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return
    if value.shape == other.shape and value.dtype == other.dtype:
        node.replace_all_uses_with(by)


def mask_kind(module: fx.GraphModule, values: IndexValues, mask: Any) -> MaskKind | None:
    """The effect of a mask for all inputs; None if it depends on them."""
    if not isinstance(mask, fx.Node):
        return None
    kind = _kind_of_known(values.of(mask))
    if kind is not None:
        return kind
    computed = _computed(module, mask)
    return None if computed is None else _kind_of_tensor(computed)


def _kind_of_known(known: Known) -> MaskKind | None:
    if isinstance(known, Never):
        return MaskKind.ALL_FALSE
    if not isinstance(known, All):
        return None
    if not known.sums:
        return MaskKind.ALL_TRUE
    causal = (*(sympy.Integer(0),) * (known.rank - 2), sympy.Integer(1), sympy.Integer(-1))
    return MaskKind.CAUSAL if known.sums == {Sum(sympy.Integer(0), causal)} else None


def _kind_of_tensor(mask: torch.Tensor) -> MaskKind | None:
    if mask.dtype is torch.bool:
        if bool(mask.all()):
            return MaskKind.ALL_TRUE
        if not bool(mask.any()):
            return MaskKind.ALL_FALSE
        allowed = mask
    elif mask.is_floating_point():  # it is added to the scores: zero hides nothing, the lowest number does
        allowed = mask == 0
        hidden = (mask == -torch.inf) | (mask == torch.finfo(mask.dtype).min)
        if not bool((allowed | hidden).all()):
            return None
        if bool(allowed.all()):
            return MaskKind.ALL_TRUE
    else:
        return None
    if mask.dim() < 2:
        return None
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return MaskKind.CAUSAL if bool((allowed == causal).all()) else None


def _computed(module: fx.GraphModule, mask: fx.Node) -> torch.Tensor | None:
    """The value of a mask that depends on constants alone and is small; otherwise None."""
    value = mask.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return Values(module).of(mask) if all(map(_is_small_constant, behind(mask))) else None


def _is_small_constant(node: fx.Node) -> bool:
    """Whether a node is no input, draws no random numbers and has a small value, if its operands do."""
    if node.op != "get_attr" and not (node.op == "call_function" and is_pure(node)):
        return False
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or not (value.is_meta or value.numel() > MOST_ELEMENTS)

"""Attention masks that need not be: one that is true everywhere is none, one that is causal is a flag.

Models make their masks out of positions with a dozen operators, whether or not the user gave one. Where it
depends on sizes and constants alone, a mask is looked at here, once for all engines: with fixed sizes by
computing it, with sizes that vary by what is provable of it for any (see `index_values`).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx

from intarsia.lower.index_values import All, IndexValues, Known, Never, Sum
from intarsia.lower.purity import is_pure

aten = torch.ops.aten
_ANDS = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)
MOST_ELEMENTS = 1 << 24  # of a mask that is computed to be looked at


class MaskKind(Enum):
    """What a mask is known to do."""

    ALL_TRUE = "lets everything through"
    ALL_FALSE = "lets nothing through"
    CAUSAL = "lets through what does not come later"


def simplify_masks(module: fx.GraphModule) -> None:
    """Take out masks that hide nothing, and turn causal ones into `is_causal=True`."""
    values = IndexValues(module)
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.scaled_dot_product_attention.default:
            _simplify_attention(module, values, node)
        elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            # Filled where the mask is true: nothing, if it is false everywhere.
            if mask_kind(module, values, node.args[1]) is MaskKind.ALL_FALSE:
                _replace(node, node.args[0])
        elif node.target in _ANDS:
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
    """Take the other part of an `and` for the whole, without memory for what repeats.

    A mask of padding is the same for every query. Kernels read it as one row then.
    """
    made, given = node.meta.get("val"), by.meta.get("val") if isinstance(by, fx.Node) else None
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return
    if not made.dtype == given.dtype == torch.bool:
        return
    sizes = [_size(node, size) for size in made.shape]
    if all(size is not None for size in sizes):
        with node.graph.inserting_before(node):
            expanded = node.graph.call_function(aten.expand.default, (by, sizes))
        expanded.meta = dict(node.meta) | {"val": given.expand(made.shape)}
        node.replace_all_uses_with(expanded)


def _size(before: fx.Node, size: Any) -> Any:
    """A size as an argument: a number, or the node before this one that has it."""
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
    made, given = node.meta.get("val"), by.meta.get("val") if isinstance(by, fx.Node) else None
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return
    if made.shape == given.shape and made.dtype == given.dtype:
        node.replace_all_uses_with(by)


def mask_kind(module: fx.GraphModule, values: IndexValues, mask: Any) -> MaskKind | None:
    """What a mask is known to do, whatever the inputs; None if it depends on them."""
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
    elif mask.is_floating_point():  # added to the scores: zero lets through, the lowest number hides
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
    """The mask's value, if it depends on constants alone and is small enough to look at."""
    value = mask.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    order = _cone(mask)
    if order is None or value.numel() > MOST_ELEMENTS:
        return None
    known: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in order:
            if node.op == "get_attr":
                known[node] = getattr(module, str(node.target))
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    value = known[mask]
    return value if isinstance(value, torch.Tensor) else None


def _cone(mask: fx.Node) -> list[fx.Node] | None:
    """What a node is computed from, in the order it is computed; None if an input or chance is among it."""
    cone: dict[fx.Node, None] = {}
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in cone:
            continue
        if node.op not in ("get_attr", "call_function") or not (node.op == "get_attr" or is_pure(node)):
            return None
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.is_meta or value.numel() > MOST_ELEMENTS):
            return None
        cone[node] = None
        waiting += node.all_input_nodes
    place = {node: index for index, node in enumerate(mask.graph.nodes)}
    return sorted(cone, key=place.__getitem__)

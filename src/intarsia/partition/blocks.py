"""Which blocks are worth an engine: small ones go back to PyTorch, heavy ones are split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import attrgetter

import torch
from torch import fx

from intarsia.capture.annotate import wanted_engine
from intarsia.errors import count_text
from intarsia.graph.nodes import bodies_of, is_control_flow, is_view
from intarsia.graph.sizes import bytes_of, size_hint

MIN_WORK = 6.0
"""The cost of entering an engine, in units of work; see `work`."""

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_LINEAR = ("linear", "quantized_linear", "integer_linear")
_CONTRACTIONS = ("mm", "bmm", "addmm", "baddbmm", "matmul", *_LINEAR, "einsum")


def work(node: fx.Node) -> float:
    """The work of a node that an engine can save, in units of about one small eager op.

    A view has none. Any other op has 1 unit, plus 1 for every megabyte that it writes. A contraction (a
    matrix product, a convolution, attention, a recurrent layer) has 3 more, plus 1 for every megaflop.
    Control flow has the work of each of its bodies, once.
    """
    if is_view(node):
        return 0.0
    if is_control_flow(node):
        inner = (one for body in bodies_of(node) for one in body.graph.nodes if one.op == "call_function")
        return sum(map(work, inner), 0.0)
    units = 1.0 + bytes_of(node.meta.get("val")) / 2**20
    name = _name(node)
    if name in (*_CONTRACTIONS, *_RECURRENT) or name.startswith("conv") or "attention" in name:
        units += 3.0 + _flops(node, name) / 1e6
    return units


def too_small(nodes: Sequence[fx.Node], min_block_size: int | None) -> str | None:
    """Why a block of these nodes is not worth an engine; None if it is.

    A block with a node that `run_on` names always is, since the user asked for it.
    """
    if any(wanted_engine(node) is not None for node in nodes):
        return None
    if min_block_size is not None:
        if len(nodes) >= min_block_size:
            return None
        return f"its segment has {count_text(len(nodes), 'op')}, and min_block_size={min_block_size}"
    total = sum(work(node) for node in nodes)
    if total >= MIN_WORK:
        return None
    block = f"its segment of {count_text(len(nodes), 'op')} has {total:.1f} units of work"
    return f"{block}; an engine is used from {MIN_WORK:g}"


IS_WEIGHT = "intarsia_is_weight"  # set in `meta` of an input of a body that takes a weight


def weights_of(node: fx.Node) -> dict[fx.Node, int]:
    """The constants that a node reads, directly or through views, with the bytes of each."""
    sizes: dict[fx.Node, int] = {}
    for value in node.all_input_nodes:
        base = value
        while is_view(base):
            base = base.all_input_nodes[0]
        if base.op == "get_attr" or base.meta.get(IS_WEIGHT):
            sizes[base] = bytes_of(_constant(base))
    return sizes


def _constant(node: fx.Node) -> object:
    """The value of a `get_attr` node or a weight."""
    if "val" in node.meta:
        return node.meta["val"]
    owner = node.graph.owning_module
    return None if owner is None else attrgetter(str(node.target))(owner)


def split_by_weight(units: Iterable[Sequence[fx.Node]], budget: int) -> list[list[Sequence[fx.Node]]]:
    """Consecutive parts of a block, each with at most `budget` bytes of weights unless one unit has more."""
    parts: list[list[Sequence[fx.Node]]] = []
    weights: dict[fx.Node, int] = {}
    for unit in units:
        own: dict[fx.Node, int] = {}
        for node in unit:
            own.update(weights_of(node))
        if not parts or (own and sum((weights | own).values()) > budget):
            parts.append([])
            weights = {}
        weights |= own
        parts[-1].append(unit)
    return parts


def too_heavy(unit: Sequence[fx.Node], engine: str, budgets: Mapping[str, int]) -> str | None:
    """Why one unit alone exceeds the budget of `engine`; None if it does not."""
    budget = budgets.get(engine)
    if budget is None:
        return None
    weights: dict[fx.Node, int] = {}
    for node in unit:
        weights.update(weights_of(node))
    total = sum(weights.values())
    return f"its weights take {total} bytes, and memory_budget is {budget}" if total > budget else None


def _flops(node: fx.Node, name: str) -> float:
    """Two for each multiply-add: the number of results times the length of their sums. 0 if it is unknown."""
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() >= 2]
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    if len(tensors) < 2 or not isinstance(value, torch.Tensor) or name == "einsum":
        return 0.0
    if name in _RECURRENT:  # every step of every sequence is multiplied by all weights
        steps = prod(size_hint(size) for size in tensors[0].shape[:-1])
        operands = node.args[2] if isinstance(node.args[2], list | tuple) else ()
        weights = [operand.meta.get("val") for operand in operands if isinstance(operand, fx.Node)]
        return 2.0 * steps * sum(w.numel() for w in weights if isinstance(w, torch.Tensor))
    results = prod(size_hint(size) for size in value.shape)
    if name.startswith("conv"):
        transposed = "transpose" in name or (name == "convolution" and node.args[6] is True)
        if transposed:  # every element of the input, not of the result, is multiplied by the whole kernel
            results = prod(size_hint(size) for size in tensors[0].shape)
        depth = prod(size_hint(size) for size in tensors[1].shape[1:])
    elif "attention" in name:
        depth = 2 * size_hint(tensors[1].shape[-2])
    elif name in _LINEAR:
        depth = size_hint(tensors[0].shape[-1])
    else:
        depth = size_hint(tensors[-1].shape[-2])
    return 2.0 * results * depth


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "").lstrip("_")

"""Attention from its fragments, with shared heads, on rows, and with biases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.network.value import MICROSOFT
from intarsia.rewrite.fusions.fusion import Fusion, given, integers, order_of, scalar, weight
from intarsia.rewrite.pattern import Refusal, refuse, rule

_HIDDEN = -1e4  # softmax of a score at or below this is 0, since exp underflows
_SCALES = ("qm", "qd", "km", "kd", "sm", "sd")


def _scaled(op: Any, x: Any, times: Any, over: Any) -> Any:
    return op.either(op.Mul(x, op.constant(times)), op.Div(x, op.constant(over)), x)


def _fragments(
    op: Any, q: Any, k: Any, v: Any, kt: Any, mask: Any, keep: Any, hide: Any, fill: Any,
    qm: Any, qd: Any, km: Any, kd: Any, sm: Any, sd: Any,
) -> Any:  # fmt: skip
    turned = op.either(op.Transpose(k, perm=op.any, _name="turn"), kt)
    scores = _scaled(op, op.MatMul(_scaled(op, q, qm, qd), _scaled(op, turned, km, kd)), sm, sd)
    masked = op.either(
        op.Add(scores, mask),
        op.Where(keep, scores, op.constant(fill)),
        op.Where(hide, op.constant(fill), scores),
        scores,
    )
    return op.MatMul(op.Softmax(masked, axis=-1, _name="softmax"), v)


@rule(_fragments)
def attention(
    net: Network, q: Tensor, k: Tensor | None, v: Tensor, kt: Tensor | None, mask: Tensor | None,
    keep: Tensor | None, hide: Tensor | None, fill: Tensor | None, softmax: Layer, turn: Layer | None,
    qm: Tensor | None, qd: Tensor | None, km: Tensor | None, kd: Tensor | None, sm: Tensor | None,
    sd: Tensor | None,
) -> object:  # fmt: skip
    """softmax(q @ k' * scale + mask) @ v. Any factor may have the scale; Add or Where may apply the mask."""
    scores = softmax.get_inputs(0)[0]
    assert scores is not None
    if q.ndim not in (3, 4) or v.ndim != q.ndim or scores.ndim != q.ndim:
        return refuse(f"q has {q.ndim} dimensions, v {v.ndim}, the scores {scores.ndim}")
    outer = q.shape[:-2]
    if None in outer or v.shape[:-2] != outer or scores.shape[:-2] != outer:
        return refuse(
            f"batch and heads differ: q {list(q.shape)}, scores {list(scores.shape)}, v {list(v.shape)}"
        )
    source = kt if kt is not None else k
    assert source is not None
    order = list(range(q.ndim)) if turn is None else order_of(turn, source.ndim)
    order[-2:] = order[-1], order[-2]  # the order of k, whose transpose is the factor
    if len(order) != q.ndim or tuple(source.shape[axis] for axis in order[:-2]) != outer:
        return refuse(f"batch and heads differ: q {list(q.shape)}, k {list(source.shape)}")
    scale = _product(qm, qd, km, kd, sm, sd)
    if isinstance(scale, Refusal):
        return scale
    bias = _mask(scores, mask, keep if keep is not None else hide, fill, inverted=hide is not None)
    if isinstance(bias, Refusal):
        return bias
    causal = isinstance(bias, np.ndarray) and _is_causal(bias)
    if scale <= 0:
        return refuse(f"the scale is {scale}")

    def wide(x: Tensor) -> Tensor:
        return F.unsqueeze(x, [1]) if q.ndim == 3 else x

    key = source if order == list(range(q.ndim)) else F.transpose(source, order)
    added = None if causal else _as_tensor(bias, q, scores)
    heads = F.attention(wide(q), wide(key), wide(v), added, scale=scale, is_causal=causal)
    return heads if q.ndim == 4 else F.squeeze(heads, [1])


def _product(*scales: Tensor | None) -> float | Refusal:
    """The product of all scales, where every second one is a divisor."""
    total = 1.0
    for index, tensor in enumerate(scales):
        if tensor is None:
            continue
        number = scalar(tensor)
        if number is None or number == 0 or tensor.ndim > 4:
            return refuse(f"the scale {tensor.name} is not one number")
        total = total / number if index % 2 else total * number
    return total


def _mask(
    scores: Tensor, added: Tensor | None, chosen: Tensor | None, fill: Tensor | None, inverted: bool
) -> Tensor | np.ndarray[Any, Any] | Refusal | None:
    """The mask that is added to the scores: a tensor, or an array if it is constant."""
    mask = added if added is not None else chosen
    if mask is None:
        return None
    shape = (1,) * (scores.ndim - mask.ndim) + mask.shape
    if len(shape) != scores.ndim or any(
        m != 1 and (m != s or m is None) for m, s in zip(shape, scores.shape, strict=True)
    ):
        return refuse(f"the mask is {list(mask.shape)}, the scores {list(scores.shape)}")
    if added is not None:
        return mask if mask.constant is None else np.asarray(mask.constant)
    lowest = scalar(fill)
    if lowest is None or lowest > _HIDDEN:
        return refuse(f"hidden scores are filled with {lowest}, which does not make their weights 0")
    if mask.constant is not None:
        visible = mask.constant != inverted
        if not np.all(np.any(visible, axis=-1)):
            return refuse("the mask hides a whole row")
        return np.where(visible, 0.0, -np.inf).astype(np.float32)
    if not math.isinf(lowest):
        return refuse(f"a row hidden whole by {mask.name} gets equal weights from {lowest}, none from a mask")
    zero, low = F.constant(0.0, scores.dtype), F.constant(-np.inf, scores.dtype)
    return F.where(mask, low, zero) if inverted else F.where(mask, zero, low)


def _is_causal(mask: np.ndarray[Any, Any]) -> bool:
    """Whether a constant mask is causal: it hides exactly the later positions."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.size != mask.shape[-1] ** 2:
        return False
    square = mask.reshape(mask.shape[-2:]).astype(np.float64)
    ahead = np.triu(np.ones(square.shape, bool), 1)
    return bool(np.all(square[~ahead] == 0) and np.all(square[ahead] <= _HIDDEN))


def _as_tensor(bias: Tensor | np.ndarray[Any, Any] | None, q: Tensor, scores: Tensor) -> Tensor | None:
    """The mask with four dimensions and a row for each query, as engines need it."""
    if bias is None:
        return None
    mask = bias if isinstance(bias, Tensor) else F.constant(bias, scores.dtype)
    if scores.ndim == 3 and mask.ndim == 3:
        mask = F.unsqueeze(mask, [1])
    if mask.ndim < 4:
        mask = F.unsqueeze(mask, list(range(4 - mask.ndim)))
    if mask.shape[2] == 1 and q.shape[-2] != 1:
        length = q.shape[-2]
        mask = F.expand(mask, [1, 1, length if isinstance(length, int) else F.size(q, -2), 1])
    return mask


def _written(rng: np.random.Generator, large: bool) -> None:
    batch, heads, rows, columns, width = (1, 12, 128, 128, 64) if large else (2, 3, 4, 5, 6)
    way = 2 if large else int(rng.integers(8))
    if way in (4, 5):
        columns = rows
    outer = (batch,) if way == 6 else (batch, heads)
    q, v = given("q", *outer, rows, width), given("v", *outer, columns, width)
    k = given("k", batch, columns, heads, width) if way == 3 else given("k", *outer, columns, width)
    swap = (0, 2, 3, 1) if way == 3 else (*range(len(outer)), len(outer) + 1, len(outer))
    kt = F.transpose(k, swap)
    scale = float(rng.choice([0.5, 1 / math.sqrt(width)]))
    if way == 0:
        scores = F.matmul(q * scale, kt)
    elif way == 1:
        scores = F.matmul(q * math.sqrt(scale), kt * math.sqrt(scale)) + given("mask", rows, columns)
    else:
        scores = F.matmul(q, kt) / (1 / scale)
    if way == 2:
        scores = scores + given("mask", batch, 1, 1, columns)
    elif way == 3:
        scores = given("mask", batch, 1, rows, columns) + scores
    elif way == 4:
        scores = F.where(
            F.constant(np.tril(np.ones((rows, rows), bool))), scores, float(np.finfo(np.float32).min)
        )
    elif way == 5:
        scores = scores + F.constant(np.triu(np.full((1, 1, rows, rows), -1e9, np.float32), 1))
    elif way == 7:
        hidden = F.constant(np.arange(columns) >= columns - 1)
        scores = F.where(F.reshape(hidden, (1, 1, 1, columns)), -np.inf, scores)
    F.matmul(F.softmax(scores, -1), v).mark_output("y")


def _repeated(op: Any, x: Any, axes: Any, copies: Any, sizes: Any, name: str) -> Any:
    wide = op.Expand(op.Unsqueeze(x, op.constant(axes)), op.constant(copies), _name=name)
    return op.Reshape(wide, op.constant(sizes), allowzero=op.any, _name=f"{name}_flat")


def _shared_heads(
    op: Any, q: Any, k: Any, v: Any, mask: Any, a0: Any, c0: Any, s0: Any, a1: Any, c1: Any, s1: Any
) -> Any:
    keys, values = _repeated(op, k, a0, c0, s0, "key"), _repeated(op, v, a1, c1, s1, "value")
    return op.Attention(q, keys, values, op.maybe(mask), _any_attributes=True, _name="whole")


@rule(_shared_heads)
def grouped_heads(
    net: Network, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, a0: Tensor, a1: Tensor,
    key: Layer, key_flat: Layer, value: Layer, value_flat: Layer, whole: Layer,
) -> object:  # fmt: skip
    """Attention with keys and values that are repeated for every head of a group. It needs no copies."""
    for x, axes, wide, flat in ((k, a0, key, key_flat), (v, a1, value, value_flat)):
        if x.ndim != 4 or integers(axes) != [2]:
            return refuse(f"{x!r} is repeated along {integers(axes)}, not along the axis after its heads")
        heads, copied = x.shape[1], wide.get_outputs(0)[0].shape
        if not isinstance(heads, int) or not isinstance(copied[2], int):
            return refuse(f"the heads of {x!r} are not known")
        shape = flat.get_outputs(0)[0].shape
        if copied[:2] != x.shape[:2] or copied[3:] != x.shape[2:] or None in (copied[0], copied[3]):
            return refuse(f"{list(x.shape)} is repeated to {list(copied)}")
        if shape != (x.shape[0], heads * copied[2], *x.shape[2:]) or shape[1] != q.shape[1]:
            return refuse(f"the repeated heads are {list(shape)}")
    attributes = {name: whole.attribute(name) for name in whole.node.attributes}
    return F.op("Attention", q, k, v, mask, **attributes)


def _grouped_written(rng: np.random.Generator, large: bool) -> None:
    batch, groups, copies, length, width = (1, 4, 4, 128, 64) if large else (2, 2, 3, 4, 5)
    q = given("q", batch, groups * copies, length, width)
    summed = []
    for name in "kv":
        x = F.unsqueeze(given(name, batch, groups, length, width), [2])
        wide = F.expand(x, (1, 1, copies, 1, 1))
        summed.append(F.reshape(wide, (batch, groups * copies, length, width)))
    F.attention(q, summed[0], summed[1], scale=0.5).mark_output("y")


def _rows(op: Any, q: Any, k: Any, v: Any, mask: Any, s0: Any, s1: Any, s2: Any, back: Any) -> Any:
    def heads(x: Any, sizes: Any, name: str) -> Any:
        split = op.Reshape(x, op.constant(sizes), allowzero=op.any, _name=name)
        return op.Transpose(split, perm=[0, 2, 1, 3])

    parts = heads(q, s0, "qh"), heads(k, s1, "kh"), heads(v, s2, "vh")
    whole = op.Attention(*parts, op.maybe(mask), scale=op.any, _name="whole")
    return op.Reshape(
        op.Transpose(whole, perm=[0, 2, 1, 3]), op.constant(back), allowzero=op.any, _name="out"
    )


@rule(_rows)
def multi_head_attention(
    net: Network, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    qh: Layer, kh: Layer, vh: Layer, whole: Layer, out: Layer,
) -> object:  # fmt: skip
    """Attention on heads that are split from rows and joined again, as one layer on rows."""
    splits = [layer.get_outputs(0)[0].shape for layer in (qh, kh, vh)]
    result = out.get_outputs(0)[0]
    for x, split in zip((q, k, v), splits, strict=True):
        if x.ndim not in (2, 3) or not all(isinstance(d, int) for d in (*x.shape, *split)):
            return refuse(f"{x!r} is not rows of known sizes")
        if len(split) != 4 or split[2] != splits[0][2] or x.shape[-1] != _times(split[2:]):
            return refuse(f"{list(x.shape)} is split into {list(split)}")
        if x.ndim == 3 and x.shape[:2] != split[:2]:
            return refuse(f"{list(x.shape)} is split into {list(split)}")
    batch, length, heads, _ = splits[0]
    width = _times(splits[2][2:])
    if result.shape not in ((batch, length, width), (_times((batch, length)), width)):
        return refuse(f"the heads are joined as {list(result.shape)}")
    wide = (heads, length, splits[1][1])
    if mask is not None and (mask.ndim != 4 or mask.shape[1:] not in (wide, (1, *wide[1:]))):
        return refuse(f"the mask is {list(mask.shape)}")
    if mask is not None and mask.dtype != q.dtype:
        return refuse(f"the mask is {mask.dtype.name}")
    scale = whole.attribute("scale")
    options = {} if scale is None else {"scale": float(scale)}
    rows = [_as_rows(x, split) for x, split in zip((q, k, v), splits, strict=True)]
    extra = [] if mask is None else [None, None, mask]
    makes = [(result.dtype, (batch, length, width))]
    whole_rows = F.opaque(
        MICROSOFT, "MultiHeadAttention", *rows, *extra, makes=makes, num_heads=heads, **options
    )[0]
    return whole_rows if result.ndim == 3 else F.reshape(whole_rows, [int(d) for d in result.shape])  # type: ignore[arg-type]


def _times(dims: Any) -> int:
    return math.prod(int(d) for d in dims)


def _as_rows(x: Tensor, split: Any) -> Tensor:
    return x if x.ndim == 3 else F.reshape(x, (int(split[0]), int(split[1]), int(x.shape[1])))  # type: ignore[arg-type]


def _row_inputs(rng: np.random.Generator, large: bool) -> tuple[list[Tensor], int]:
    batch, length, heads, width = (1, 128, 12, 64) if large else (2, 4, 3, 8)
    return [given(name, batch, length, heads * width) for name in "qkv"], heads


def _rows_written(rng: np.random.Generator, large: bool) -> None:
    rows, heads = _row_inputs(rng, large)
    batch, length, whole = (int(d) for d in rows[0].shape)  # type: ignore[arg-type]
    q, k, v = (F.transpose(F.reshape(x, (batch, length, heads, -1)), (0, 2, 1, 3)) for x in rows)
    mask = given("mask", batch, 1, length, length) if rng.integers(2) or large else None
    result = F.transpose(F.attention(q, k, v, mask, scale=0.25), (0, 2, 1, 3))
    F.reshape(result, (batch, length, whole) if rng.integers(2) else (-1, whole)).mark_output("y")


def _biased(op: Any, q: Any, k: Any, v: Any, a: Any, b: Any, c: Any) -> Any:
    sums = [op.Add(x, op.constant(bias)) for x, bias in ((q, a), (k, b), (v, c))]
    return op.domain(MICROSOFT).MultiHeadAttention(*sums, _any_attributes=True, _name="whole")


@rule(_biased)
def attention_bias(
    net: Network, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor, whole: Layer
) -> object:
    """Attention after sums with constants, which become its bias."""
    biases = [np.asarray(t.constant) for t in (a, b, c)]
    for x, bias in zip((q, k, v), biases, strict=True):
        if x.constant is not None:
            return refuse(f"both operands of the sum of {x.name} are constant")
        if bias.ndim != 1 or bias.shape[0] != x.shape[-1]:
            return refuse(f"the bias of {x.name} is {list(bias.shape)}")
    result = whole.get_outputs(0)[0]
    attributes = {name: whole.attribute(name) for name in whole.node.attributes}
    together = F.constant(np.concatenate(biases))
    makes = [(result.dtype, result.shape)]
    return F.opaque(MICROSOFT, "MultiHeadAttention", q, k, v, together, makes=makes, **attributes)[0]


def _bias_written(rng: np.random.Generator, large: bool) -> None:
    rows, heads = _row_inputs(rng, large)
    summed = [x + weight(rng, int(x.shape[2])) for x in rows]  # type: ignore[arg-type]
    makes = [(rows[0].dtype, rows[0].shape)]
    results = F.opaque(MICROSOFT, "MultiHeadAttention", *summed, makes=makes, num_heads=heads, scale=0.25)
    results[0].mark_output("y")


FUSIONS = (
    # The engines' attention gives 0, not NaN, where every score of a row is -inf, and adds a causal mask to
    # scores that the fragments replace: NaN in a later key is not hidden.
    Fusion("attention", attention, _written, 75, finite_only=True),
    Fusion("grouped_heads", grouped_heads, _grouped_written, 72),
    Fusion("multi_head_attention", multi_head_attention, _rows_written, 28, group=MICROSOFT),
    Fusion("attention_bias", attention_bias, _bias_written, 27, group=MICROSOFT),
)

"""Shape rules of neural-network operators: convolution, pooling, norms, attention, recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.infer.registry import Made, first, infers, known_ints
from intarsia.network.types import MICROSOFT, Dim
from intarsia.network.value import TypedValue


def _window(size: Dim, kernel: int, stride: int, dilation: int, pads: int, ceil: bool = False) -> Dim:
    if not isinstance(size, int):
        return None
    span = size + pads - dilation * (kernel - 1) - 1
    return (-(-span // stride) if ceil else span // stride) + 1


def _spatial(attributes: Mapping[str, Any], rank: int) -> tuple[list[int], list[int], list[int]]:
    strides = list(attributes.get("strides") or [1] * rank)
    dilations = list(attributes.get("dilations") or [1] * rank)
    pads = list(attributes.get("pads") or [0] * 2 * rank)
    return strides, dilations, pads


@infers("Conv")
def _conv(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, w = first(inputs), inputs[1]
    assert w is not None
    rank = x.ndim - 2
    kernel = w.shape[2:]
    strides, dilations, pads = _spatial(attributes, rank)
    sizes = tuple(
        _window(x.shape[2 + i], k, strides[i], dilations[i], pads[i] + pads[i + rank])
        if isinstance(k, int)
        else None
        for i, k in enumerate(kernel)
    )
    return [(x.dtype, (x.shape[0], w.shape[0], *sizes))]


@infers("ConvTranspose")
def _conv_transpose(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, w = first(inputs), inputs[1]
    assert w is not None
    rank = x.ndim - 2
    strides, dilations, pads = _spatial(attributes, rank)
    extra = list(attributes.get("output_padding") or [0] * rank)
    sizes: list[Dim] = []
    for i, kernel in enumerate(w.shape[2:]):
        size = x.shape[2 + i]
        if not isinstance(size, int) or not isinstance(kernel, int):
            sizes.append(None)
            continue
        span = dilations[i] * (kernel - 1) + 1 + extra[i]
        sizes.append(strides[i] * (size - 1) + span - pads[i] - pads[i + rank])
    channels = w.shape[1]
    groups = int(attributes.get("group", 1))
    return [(x.dtype, (x.shape[0], channels * groups if isinstance(channels, int) else None, *sizes))]


@infers("MaxPool", "AveragePool", "LpPool")
def _pool(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    kernel = list(attributes["kernel_shape"])
    rank = len(kernel)
    strides, dilations, pads = _spatial(attributes, rank)
    ceil = bool(attributes.get("ceil_mode", 0))
    sizes: list[Dim] = []
    for i in range(rank):
        size = x.shape[2 + i]
        out = _window(size, kernel[i], strides[i], dilations[i], pads[i] + pads[i + rank], ceil)
        # A window may not start in the padding behind the input.
        if (
            ceil
            and isinstance(out, int)
            and isinstance(size, int)
            and (out - 1) * strides[i] >= size + pads[i]
        ):
            out -= 1
        sizes.append(out)
    shape = (*x.shape[:2], *sizes)
    return [(x.dtype, shape), (ir.DataType.INT64, shape)][:outputs]


@infers("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, (*x.shape[:2], *[1] * (x.ndim - 2)))]


@infers("BatchNormalization")
def _batch_norm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, x.shape), *[(x.dtype, (x.shape[1],))] * (outputs - 1)]


@infers("LayerNormalization")
def _layer_norm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = int(attributes.get("axis", -1)) % x.ndim
    statistics = (*x.shape[:axis], *[1] * (x.ndim - axis))
    return [(x.dtype, x.shape), *[(ir.DataType.FLOAT, statistics)] * (outputs - 1)]


@infers("Attention")
def _attention(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    q, k, v = first(inputs), inputs[1], inputs[2]
    assert k is not None and v is not None
    if q.ndim != 4:
        raise NetworkError(f"Attention over {q.ndim} dimensions; heads must be split")
    made: Made = [(q.dtype, (*q.shape[:3], v.shape[3])), (k.dtype, k.shape), (v.dtype, v.shape)]
    made.append((q.dtype, (*q.shape[:3], k.shape[2])))
    return made[:outputs]


@infers("Resize")
def _resize(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    sizes = known_ints(inputs[3]) if len(inputs) > 3 else None
    if sizes is not None:
        return [(x.dtype, tuple(sizes))]
    scales = inputs[2].constant if len(inputs) > 2 and inputs[2] is not None else None
    if scales is None:
        return [(x.dtype, (None,) * x.ndim)]
    dims = [int(d * float(s)) if isinstance(d, int) else None for d, s in zip(x.shape, scales, strict=True)]
    return [(x.dtype, tuple(dims))]


@infers("GridSample")
def _grid_sample(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, grid = first(inputs), inputs[1]
    assert grid is not None
    return [(x.dtype, (*x.shape[:2], *grid.shape[1:-1]))]


@infers("DepthToSpace")
def _depth_to_space(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, block = first(inputs), int(attributes["blocksize"])
    n, c, h, w = x.shape
    return [
        (
            x.dtype,
            (
                n,
                c // block**2 if isinstance(c, int) else None,
                h * block if isinstance(h, int) else None,
                w * block if isinstance(w, int) else None,
            ),
        )
    ]


@infers("SpaceToDepth")
def _space_to_depth(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, block = first(inputs), int(attributes["blocksize"])
    n, c, h, w = x.shape
    return [
        (
            x.dtype,
            (
                n,
                c * block**2 if isinstance(c, int) else None,
                h // block if isinstance(h, int) else None,
                w // block if isinstance(w, int) else None,
            ),
        )
    ]


@infers("LSTM", "GRU", "RNN")
def _recurrent(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    hidden = int(attributes["hidden_size"])
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    state = (x.dtype, (directions, x.shape[1], hidden))
    return [(x.dtype, (x.shape[0], directions, x.shape[1], hidden)), state, state][:outputs]


@infers("Gelu", "FastGelu", "BiasGelu", "QuickGelu", domain=MICROSOFT)
def _microsoft_like_first(
    inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int
) -> Made:
    x = first(inputs)
    return [(x.dtype, x.shape)]


@infers("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_norm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    moment = (ir.DataType.FLOAT, (*x.shape[:-1], 1))
    return [(x.dtype, x.shape), moment, moment, (x.dtype, x.shape)][:outputs]

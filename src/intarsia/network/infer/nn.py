"""Shape rules of neural-network operators: convolution, pooling, norms, attention, recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, optional, second
from intarsia.network.types import MICROSOFT, Dim, Shape
from intarsia.network.value import TypedValue


def _numbers(attributes: Mapping[str, Any], name: str, count: int, default: int) -> list[int]:
    """An attribute of one number for each dimension."""
    found = list(attributes.get(name) or [default] * count)
    if len(found) != count:
        raise NetworkError(f"{name}={found} should have {count} numbers")
    return found


def _window(attributes: Mapping[str, Any], sizes: Shape, kernel: Shape) -> tuple[Dim, ...]:
    """How often a window fits along each dimension, with padding, strides, dilations and `auto_pad`."""
    rank = len(sizes)
    strides, dilations = _numbers(attributes, "strides", rank, 1), _numbers(attributes, "dilations", rank, 1)
    pads = _numbers(attributes, "pads", 2 * rank, 0)
    auto, ceil = str(attributes.get("auto_pad", "NOTSET")), bool(attributes.get("ceil_mode", 0))
    made: list[Dim] = []
    for i, (size, window) in enumerate(zip(sizes, kernel, strict=True)):
        if not isinstance(size, int) or not isinstance(window, int):
            made.append(None)
            continue
        if auto.startswith("SAME"):
            made.append(-(-size // strides[i]))
            continue
        padded = size if auto == "VALID" else size + pads[i] + pads[i + rank]
        span = padded - dilations[i] * (window - 1) - 1
        if span < 0:
            raise NetworkError(f"a window of {window} does not fit into {padded}")
        count = (-(-span // strides[i]) if ceil else span // strides[i]) + 1
        # A window may not start in the padding behind the input.
        if ceil and (count - 1) * strides[i] >= size + (0 if auto == "VALID" else pads[i]):
            count -= 1
        made.append(count)
    return tuple(made)


def _kernel(attributes: Mapping[str, Any], x: TypedValue, w: TypedValue, what: str) -> Shape:
    """The sizes of a convolution's window."""
    shapes.require_rank(x, f"the input of {what}", 3, 99)
    shapes.require_rank(w, f"the weight of {what}", x.ndim)
    given = _numbers(attributes, "kernel_shape", x.ndim - 2, 0)
    if not any(given):
        return w.shape[2:]
    return tuple(
        shapes.same(g, d, f"kernel_shape of {what}") for g, d in zip(given, w.shape[2:], strict=True)
    )


@infers("Conv")
def _conv(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, w = first(inputs), second(inputs)
    kernel = _kernel(attributes, x, w, "Conv")
    shapes.same(x.shape[1], shapes.product((w.shape[1], int(attributes.get("group", 1)))), "channels of Conv")
    return [(x.dtype, (x.shape[0], w.shape[0], *_window(attributes, x.shape[2:], kernel)))]


@infers("ConvTranspose")
def _conv_transpose(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, w = first(inputs), second(inputs)
    kernel, rank = _kernel(attributes, x, w, "ConvTranspose"), x.ndim - 2
    shapes.same(x.shape[1], w.shape[0], "channels of ConvTranspose")
    strides, dilations = _numbers(attributes, "strides", rank, 1), _numbers(attributes, "dilations", rank, 1)
    pads, extra = _numbers(attributes, "pads", 2 * rank, 0), _numbers(attributes, "output_padding", rank, 0)
    auto, wanted = str(attributes.get("auto_pad", "NOTSET")), attributes.get("output_shape")
    sizes: list[Dim] = []
    for i, (size, window) in enumerate(zip(x.shape[2:], kernel, strict=True)):
        if wanted is not None:
            sizes.append(int(wanted[i]))
        elif not isinstance(size, int) or not isinstance(window, int):
            sizes.append(None)
        else:
            span = dilations[i] * (window - 1) + 1
            same = max(0, span - strides[i])  # what makes size * stride of it
            cut = {"NOTSET": pads[i] + pads[i + rank], "VALID": 0}.get(auto, same)
            sizes.append(strides[i] * (size - 1) + span + extra[i] - cut)
    channels = shapes.product((w.shape[1], int(attributes.get("group", 1))))
    return [(x.dtype, (x.shape[0], channels, *sizes))]


@infers("MaxPool", "AveragePool", "LpPool")
def _pool(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    kernel = tuple(attributes["kernel_shape"])
    shapes.require_rank(x, f"the input of a pool over {len(kernel)} dimensions", len(kernel) + 2)
    shape = (*x.shape[:2], *_window(attributes, x.shape[2:], kernel))
    return [(x.dtype, shape), (ir.DataType.INT64, shape)][:outputs]


@infers("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, (*x.shape[:2], *[1] * (x.ndim - 2)))]


@infers("BatchNormalization")
def _batch_norm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    channels: Dim = x.shape[1] if x.ndim > 1 else 1
    for tensor in inputs[1:]:
        assert tensor is not None
        shapes.require_rank(tensor, "a weight of BatchNormalization", 1)
        channels = shapes.same(channels, tensor.shape[0], "channels of BatchNormalization")
    running = inputs[3]
    assert running is not None
    return [(x.dtype, x.shape), *[(running.dtype, (channels,))] * (outputs - 1)]


@infers("LayerNormalization")
def _layer_norm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = shapes.axis_of(int(attributes.get("axis", -1)), x.ndim)
    statistics = (*x.shape[:axis], *[1] * (x.ndim - axis))
    return [(x.dtype, x.shape), *[(ir.DataType.FLOAT, statistics)] * (outputs - 1)]


@infers("Attention")
def _attention(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    q, k, v = first(inputs), second(inputs), inputs[2]
    assert v is not None
    for tensor in (q, k, v):
        if tensor.ndim != 4:
            raise NetworkError(f"Attention over {tensor.ndim} dimensions; heads must be split")
    shapes.same(k.shape[2], v.shape[2], "keys and values of Attention")
    shapes.same(q.shape[3], k.shape[3], "widths of Attention")
    keys, values = (_with_past(now, optional(inputs, 4 + i)) for i, now in enumerate((k, v)))
    shapes.same(keys[2], values[2], "past keys and values of Attention")
    made: Made = [(q.dtype, (*q.shape[:3], v.shape[3])), (k.dtype, keys), (v.dtype, values)]
    made.append((q.dtype, (*q.shape[:3], keys[2])))
    return made[:outputs]


def _with_past(now: TypedValue, past: TypedValue | None) -> Shape:
    """Keys or values after those of earlier calls."""
    if past is None:
        return now.shape
    shapes.require_rank(past, "the past of Attention", 4)
    for place in (0, 1, 3):
        shapes.same(now.shape[place], past.shape[place], f"dimension {place} of Attention and its past")
    return (*past.shape[:2], shapes.add((past.shape[2], now.shape[2])), past.shape[3])


@infers("GridSample")
def _grid_sample(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, grid = first(inputs), second(inputs)
    shapes.require_rank(x, "the input of GridSample", 3, 99)
    shapes.require_rank(grid, "the grid of GridSample", x.ndim)
    shapes.same(grid.shape[-1], x.ndim - 2, "coordinates of GridSample")
    batch = shapes.same(x.shape[0], grid.shape[0], "batches of GridSample")
    return [(x.dtype, (batch, x.shape[1], *grid.shape[1:-1]))]


@infers("DepthToSpace")
def _depth_to_space(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, block = first(inputs), int(attributes["blocksize"])
    shapes.require_rank(x, "the input of DepthToSpace", 4)
    n, c, h, w = x.shape
    depth = shapes.quotient(c, block**2, "the depth")
    return [(x.dtype, (n, depth, shapes.product((h, block)), shapes.product((w, block))))]


@infers("SpaceToDepth")
def _space_to_depth(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, block = first(inputs), int(attributes["blocksize"])
    shapes.require_rank(x, "the input of SpaceToDepth", 4)
    n, c, h, w = x.shape
    height, width = shapes.quotient(h, block, "the height"), shapes.quotient(w, block, "the width")
    return [(x.dtype, (n, shapes.product((c, block**2)), height, width))]


@infers("LSTM", "GRU", "RNN")
def _recurrent(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    shapes.require_rank(x, "a sequence", 3)
    hidden = int(attributes["hidden_size"])
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    every: Shape
    last: Shape
    if attributes.get("layout"):  # the batch stands first
        batch, length, _ = x.shape
        every, last = (batch, length, directions, hidden), (batch, directions, hidden)
    else:
        length, batch, _ = x.shape
        every, last = (length, directions, batch, hidden), (directions, batch, hidden)
    made: Made = [(x.dtype, every), (x.dtype, last), (x.dtype, last)]
    return made[:outputs]


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

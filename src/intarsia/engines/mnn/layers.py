"""The layers that MNN supports."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from intarsia.engines.mnn.limits import planned
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.ops import COMPARES

# Which layers MNN runs as PyTorch does, and the forms that its converter reads.
#
# The lists hold what was compared with ONNX Runtime, layer by layer (MNN 3.6.1, x86_64). What is left out is
# either refused by the converter, or wrong: a slice by negative steps ends the process, `ReduceL2` ignores
# its axes, `Softplus` is off by 2 % for large numbers, pools ignore dilations, `Round` rounds halves up,
# `GatherElements` takes negative indices for 0, one-dimensional convolutions have results of another rank.


_MOST_DIMS = 6
_WHOLE = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.BOOL, *_WHOLE})
_LARGEST = 2**31 - 1

Condition = Callable[[Layer], str | None]


def refusal(net: Network) -> str | None:
    """The reason why MNN would run a network differently from PyTorch; None if it would not."""
    for tensor in (*net.get_inputs(), *net.get_outputs()):
        if tensor.dtype not in _TYPES:
            return f"{tensor.name} is of {tensor.dtype.name}, which MNN does not compute with"
    for layer in net.get_layers():
        reason = _layer_refusal(layer)
        if reason is not None:
            return f"{layer.kind}: {reason}"
    try:
        planned(net)
    except EngineError as error:
        return str(error)
    return None


def _layer_refusal(layer: Layer) -> str | None:
    if layer.kind not in CONDITIONS:
        return "it is not among the layers that were compared with PyTorch"
    for tensor in (*layer.get_inputs(), *layer.get_outputs()):
        if tensor is None:
            continue
        if tensor.ndim > _MOST_DIMS:
            return f"{tensor.name} has {tensor.ndim} dimensions; MNN has {_MOST_DIMS}"
        if tensor.constant is None:
            if 0 in tensor.shape:
                return f"{tensor.name} is empty"
            if tensor.dtype != ir.DataType.FLOAT and not _takes(layer.kind, tensor.dtype):
                return f"{tensor.name} is of {tensor.dtype.name}"
        elif tensor.dtype in _WHOLE and layer.kind != "Slice" and _is_wide(tensor):
            return f"{tensor.name} holds integers beyond 32 bits"
    return CONDITIONS[layer.kind](layer)


def _takes(kind: str, dtype: ir.DataType) -> bool:
    return kind in (_BOOLEANS if dtype == ir.DataType.BOOL else _INTEGERS if dtype in _WHOLE else ())


def _is_wide(tensor: Tensor) -> bool:
    array = tensor.constant
    return (
        array is not None and array.size > 0 and bool(abs(array).max() > _LARGEST or array.min() < -_LARGEST)
    )


def _always(layer: Layer) -> str | None:
    return None


def _constant(*places: int) -> Condition:
    """The inputs at these places must be known when the network is built."""

    def condition(layer: Layer) -> str | None:
        inputs = layer.get_inputs()
        for place in places:
            tensor = inputs[place] if place < len(inputs) else None
            if tensor is not None and tensor.constant is None:
                return f"{tensor.name} is not constant"
        return None

    return condition


def _window(layer: Layer) -> str | None:
    """Convolutions and pools over images."""
    x = layer.get_inputs()[0]
    assert x is not None
    if x.ndim != 4:
        return f"a window over {x.ndim - 2} dimensions is not handled"
    if str(layer.attribute("auto_pad", "NOTSET")) != "NOTSET":
        return f"auto_pad={layer.attribute('auto_pad')} is not handled"
    return None


def _convolution(layer: Layer) -> str | None:
    return _window(layer) or _constant(1, 2)(layer)


def _pool(layer: Layer) -> str | None:
    if any(step != 1 for step in layer.attribute("dilations", None) or ()):
        return f"dilations={layer.attribute('dilations')} are ignored"
    if len(layer.get_outputs()) > 1:
        return "the second output, the indices, is not handled"
    return _window(layer)


def _clip(layer: Layer) -> str | None:
    bounds = [None if x is None else x.constant for x in layer.get_inputs()[1:]]
    if len(bounds) == 2 and bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        return f"bounds from {bounds[0]} down to {bounds[1]} are not handled"  # PyTorch takes the upper one
    return _constant(1, 2)(layer)


def _slice(layer: Layer) -> str | None:
    inputs = layer.get_inputs()
    steps = inputs[4].constant if len(inputs) > 4 and inputs[4] is not None else None
    if steps is not None and (steps < 1).any():
        return f"steps={steps.tolist()} are not handled"
    return _constant(4)(layer)


def _divided(layer: Layer) -> str | None:
    """A division of integers by zero ends the process."""
    x, divisor = layer.get_inputs(0, 1)
    assert x is not None and divisor is not None
    if x.dtype == ir.DataType.FLOAT:
        return None if layer.kind == "Div" else "floats are not handled"
    if divisor.constant is None or not divisor.constant.all():
        return f"{divisor.name} may be 0"
    return None


def _cast(layer: Layer) -> str | None:
    output = layer.get_outputs(0)[0]
    return None if output.dtype in _TYPES else f"to {output.dtype.name} is not handled"


def _compared(layer: Layer) -> str | None:
    result = layer.get_outputs(0)[0]
    if spreads_both(layer) and not all(isinstance(size, int) for size in result.shape):
        return "two operands that are broadcast over varying sizes are not handled"
    return None


def spreads_both(layer: Layer) -> bool:
    """Whether both operands are broadcast against each other: MNN then mixes elements up."""
    result = layer.get_outputs(0)[0]
    operands = [tensor for tensor in layer.get_inputs() if tensor is not None]
    floats = all(tensor.dtype == ir.DataType.FLOAT for tensor in operands)
    return floats and all(tuple(tensor.shape) != tuple(result.shape) for tensor in operands)


def _where(layer: Layer) -> str | None:
    if not spread_choices(layer) or all(isinstance(n, int) for n in layer.get_outputs(0)[0].shape):
        return None
    return "operands that are broadcast over varying sizes are not handled"


def spread_choices(layer: Layer) -> list[int]:
    """The inputs that Where broadcasts over its result: MNN reads them wrongly."""
    result, choices = layer.get_outputs(0)[0], layer.get_inputs()
    return [
        place
        for place, tensor in enumerate(choices)
        if place and tensor is not None and tensor.shape != result.shape and any(n != 1 for n in tensor.shape)
    ]


def _gather(layer: Layer) -> str | None:
    data, indices = layer.get_inputs(0, 1)
    assert data is not None and indices is not None
    size = data.shape[layer.attribute("axis", 0)]
    if indices.constant is None and not (isinstance(size, int) and size <= 2**24):
        return f"indices into {size} elements are not handled"
    return None


def _shaped(layer: Layer) -> str | None:
    return "allowzero=1 is not handled" if layer.attribute("allowzero", 0) else None


def _summed(layer: Layer) -> str | None:
    if layer.attribute("exclusive", 0) or layer.attribute("reverse", 0):
        return "exclusive and reverse are not handled"
    return _constant(1)(layer)


def _one_output(layer: Layer) -> str | None:
    return "only the first output is handled" if len(layer.get_outputs()) > 1 else None


def _statistics(layer: Layer) -> str | None:
    if layer.attribute("training_mode", 0):
        return "training_mode=1 is not handled"
    return _one_output(layer) or _constant(1, 2, 3, 4)(layer)


def _resize(layer: Layer) -> str | None:
    x = layer.get_inputs()[0]
    assert x is not None
    mode, way = layer.attribute("mode", "nearest"), layer.attribute("coordinate_transformation_mode", "")
    if x.ndim != 4 or mode != "linear" or way not in ("half_pixel", "align_corners", "pytorch_half_pixel"):
        return f"mode={mode} by {way or 'half_pixel'} over {x.ndim} dimensions is not handled"
    if layer.attribute("antialias", 0) or layer.attribute("axes", None):
        return "antialias and axes are not handled"
    return _constant(1, 2, 3)(layer)


def _matmul(layer: Layer) -> str | None:
    # A vector ends the process: "double free or corruption".
    ranks = [tensor.ndim for tensor in layer.get_inputs() if tensor is not None]
    return "an operand with one dimension is not handled" if min(ranks) < 2 else None


def _attention(layer: Layer) -> str | None:
    """The attention that `expanded` can write: separate heads, no past, equal numbers of heads."""
    inputs = layer.get_inputs()
    q, k = inputs[0], inputs[1]
    assert q is not None and k is not None
    if q.ndim != 4 or q.shape[1] != k.shape[1] or len(layer.get_outputs()) > 1 or len(inputs) > 4:
        return "only plain attention with as many heads of keys as of queries is handled"
    if layer.attribute("softcap", 0.0):
        return f"softcap={layer.attribute('softcap')} is not handled"
    if layer.attribute("is_causal", 0) and not all(isinstance(x.shape[2], int) for x in (q, k)):
        return "is_causal=1 over varying lengths is not handled"
    return None if isinstance(q.shape[3], int) else "heads of varying width are not handled"


def _kinds(condition: Condition, names: str) -> dict[str, Condition]:
    return dict.fromkeys(names.split(), condition)


CONDITIONS: dict[str, Condition] = {
    **_kinds(_always, "Abs Neg Relu Floor Ceil Sqrt Exp Log Sigmoid Tanh Erf Sin Cos Tan Atan Asin Acos"),
    **_kinds(_always, "Sinh Cosh Asinh Acosh Atanh Reciprocal Softsign HardSigmoid HardSwish LeakyRelu"),
    **_kinds(_always, "Add Sub Mul Max Min Sum Softmax LogSoftmax Gemm Gelu Identity Flatten Sign"),
    **_kinds(_always, "Transpose Concat GlobalAveragePool GlobalMaxPool DepthToSpace SpaceToDepth Expand"),
    **_kinds(_always, "And Or Xor Not Shape Range ConstantOfShape"),
    **dict.fromkeys(COMPARES, _compared),
    **_kinds(_constant(1), "Unsqueeze Squeeze Tile Pow PRelu Split"),
    **_kinds(_constant(1), "ReduceMean ReduceSum ReduceMax ReduceMin Trilu"),
    **_kinds(_constant(1, 2, 3), "Pad"),
    **_kinds(_convolution, "Conv ConvTranspose"),
    **_kinds(_divided, "Div Mod"),
    **_kinds(_pool, "MaxPool AveragePool"),
    **_kinds(_statistics, "BatchNormalization InstanceNormalization"),
    **_kinds(_one_output, "LayerNormalization"),
    "Attention": _attention,
    "Cast": _cast,
    "Clip": _clip,
    "CumSum": _summed,
    "Gather": _gather,
    "MatMul": _matmul,
    "Reshape": _shaped,
    "Resize": _resize,
    "Slice": _slice,
    "Where": _where,
}
_MOVES = (
    "Identity Transpose Concat Reshape Unsqueeze Squeeze Expand Tile Gather Slice Split Flatten Where Cast"
)
_BOOLEANS = COMPARES | frozenset(f"{_MOVES} And Or Xor Not Attention".split())
_INTEGERS = COMPARES | frozenset(
    f"{_MOVES} Add Sub Mul Div Mod Max Min Neg Abs Sign CumSum ReduceSum ReduceMax ReduceMin Shape Range"
    " ConstantOfShape Clip".split()
)

"""Layers made up at random, one maker an operator: what shape rules are compared with ONNX on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

from intarsia.network.types import Shape

FLOAT, DOUBLE, INT64, INT32, BOOL = (
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.INT64,
    ir.DataType.INT32,
    ir.DataType.BOOL,
)
Draw = Callable[[st.SearchStrategy[Any]], Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Operand:
    """An input: what is known of it, and its values if it is constant."""

    shape: Shape
    dtype: ir.DataType = FLOAT
    value: Array | None = None


@dataclass
class Case:
    """One layer before it is made."""

    inputs: list[Operand | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    changed: bool = False  # after it was made up, so that it may not fit


Maker = Callable[[Draw], Case]
MAKERS: dict[str, Maker] = {}


def makes(*op_types: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(op_types, maker))
        return maker

    return register


def ints(values: list[int] | int, dtype: ir.DataType = INT64) -> Operand:
    array = np.asarray(values, dtype.numpy())
    return Operand(array.shape, dtype, array)


def shape(draw: Draw, low: int = 0, high: int = 4, *, empty: bool = True) -> tuple[int, ...]:
    sizes = st.sampled_from([0, 1, 2, 3, 4, 5] if empty else [1, 2, 3, 4, 5])
    return tuple(draw(st.lists(sizes, min_size=low, max_size=high)))


def axis(draw: Draw, rank: int) -> int:
    return int(draw(st.integers(-rank, rank - 1)))


def some_axes(draw: Draw, rank: int) -> list[int]:
    picked = draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=rank)) if rank else []
    return [i - rank if draw(st.booleans()) else i for i in picked]


def size(draw: Draw, high: int = 5) -> int:
    return int(draw(st.integers(1, high)))


def flag(draw: Draw) -> int:
    return int(draw(st.booleans()))


def maybe(draw: Draw, value: Any) -> dict[str, Any]:
    """Attributes, or none of them."""
    return value if draw(st.booleans()) else {}


def broadcasting(draw: Draw, count: int) -> list[tuple[int, ...]]:
    """Shapes that broadcast with each other."""
    whole = shape(draw)
    made = []
    for _ in range(count):
        kept = whole[draw(st.integers(0, len(whole))) :]
        made.append(tuple(1 if draw(st.booleans()) else d for d in kept))
    return made


UNARY = """
    Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish
    Identity IsInf IsNaN LeakyRelu Log Mish Neg Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu
"""


@makes(*UNARY.split())
def unary(draw: Draw) -> Case:
    return Case([Operand(shape(draw))])


@makes("Not")
def logical_unary(draw: Draw) -> Case:
    return Case([Operand(shape(draw), BOOL)])


@makes("BitwiseNot")
def bitwise_unary(draw: Draw) -> Case:
    return Case([Operand(shape(draw), INT64)])


@makes("Clip")
def clip(draw: Draw) -> Case:
    ends = [Operand(()) if draw(st.booleans()) else None for _ in range(2)]
    return Case([Operand(shape(draw)), *ends])


@makes("PRelu")
def prelu(draw: Draw) -> Case:
    x = shape(draw, 1)
    slope = tuple(1 if draw(st.booleans()) else d for d in x[draw(st.integers(0, len(x))) :])
    return Case([Operand(x), Operand(slope)])


@makes("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
def along_axis(draw: Draw) -> Case:
    x = shape(draw, 1)
    return Case([Operand(x)], maybe(draw, {"axis": axis(draw, len(x))}))


@makes("CumSum", "CumProd")
def cumulative(draw: Draw) -> Case:
    x = shape(draw, 1)
    return Case([Operand(x), ints(axis(draw, len(x)))])


@makes("LRN")
def lrn(draw: Draw) -> Case:
    return Case([Operand(shape(draw, 4, 4))], {"size": 3})


@makes("MeanVarianceNormalization")
def mean_variance(draw: Draw) -> Case:
    return Case([Operand(shape(draw, 4, 4, empty=False))])


@makes("InstanceNormalization")
def instance_norm(draw: Draw) -> Case:
    x = shape(draw, 3, 5, empty=False)
    return Case([Operand(x), Operand((x[1],)), Operand((x[1],))])


@makes("GroupNormalization")
def group_norm(draw: Draw) -> Case:
    return replace(instance_norm(draw), attributes={"num_groups": 1})


@makes("RMSNormalization")
def rms_norm(draw: Draw) -> Case:
    x = shape(draw, 1, empty=False)
    return Case([Operand(x), Operand(x[-1:])])


@makes("LayerNormalization")
def layer_norm(draw: Draw) -> Case:
    x = shape(draw, 1, empty=False)
    at = axis(draw, len(x))
    kept = Operand(x[at:])
    return Case([Operand(x), kept, *maybe(draw, [kept])], {"axis": at}, draw(st.integers(1, 3)))


@makes("BatchNormalization")
def batch_norm(draw: Draw) -> Case:
    x = shape(draw, 2, 5, empty=False)
    return Case([Operand(x), *[Operand((x[1],))] * 4])


@makes("Trilu")
def trilu(draw: Draw) -> Case:
    return Case([Operand(shape(draw, 2)), *maybe(draw, [ints(1)])], maybe(draw, {"upper": 0}))


@makes("ScatterElements")
def scatter_elements(draw: Draw) -> Case:
    x = shape(draw, 1)
    return Case([Operand(x), Operand(x, INT64), Operand(x)], maybe(draw, {"axis": axis(draw, len(x))}))


@makes("ScatterND")
def scatter_nd(draw: Draw) -> Case:
    x, rows = shape(draw, 1), size(draw)
    depth = draw(st.integers(1, len(x)))
    return Case([Operand(x), Operand((rows, depth), INT64), Operand((rows, *x[depth:]))])


@makes("TensorScatter")
def tensor_scatter(draw: Draw) -> Case:
    x = shape(draw, 3, 4, empty=False)
    update = list(x)
    update[-2] = draw(st.integers(1, x[-2]))
    return Case([Operand(x), Operand(tuple(update)), *maybe(draw, [Operand((x[0],), INT64)])])


@makes("RotaryEmbedding")
def rotary(draw: Draw) -> Case:
    batch, heads, length, half = size(draw), size(draw), size(draw), size(draw)
    cache = Operand((batch, length, half))
    if draw(st.booleans()):
        return Case([Operand((batch, heads, length, 2 * half)), cache, cache])
    return Case([Operand((batch, length, heads * 2 * half)), cache, cache], {"num_heads": heads})


@makes("ReverseSequence")
def reverse_sequence(draw: Draw) -> Case:
    x = shape(draw, 2, empty=False)
    return Case([Operand(x), Operand((x[1],), INT64)])


@makes("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
def binary(draw: Draw) -> Case:
    return Case([Operand(s, INT64) for s in broadcasting(draw, 2)])


@makes("BitwiseAnd", "BitwiseOr", "BitwiseXor")
def bitwise(draw: Draw) -> Case:
    return Case([Operand(s, INT32) for s in broadcasting(draw, 2)])


@makes("BitShift")
def bit_shift(draw: Draw) -> Case:
    return Case([Operand(s, ir.DataType.UINT8) for s in broadcasting(draw, 2)], {"direction": "LEFT"})


@makes("And", "Or", "Xor")
def logical(draw: Draw) -> Case:
    return Case([Operand(s, BOOL) for s in broadcasting(draw, 2)])


@makes("Max", "Min", "Mean", "Sum")
def variadic(draw: Draw) -> Case:
    return Case([Operand(s) for s in broadcasting(draw, draw(st.integers(1, 3)))])


@makes("Where")
def where(draw: Draw) -> Case:
    one, two, three = broadcasting(draw, 3)
    return Case([Operand(one, BOOL), Operand(two), Operand(three)])


@makes("Cast")
def cast(draw: Draw) -> Case:
    return Case([Operand(shape(draw))], {"to": draw(st.sampled_from([INT64, BOOL, DOUBLE]))})


@makes("CastLike")
def cast_like(draw: Draw) -> Case:
    return Case([Operand(shape(draw)), Operand(shape(draw), draw(st.sampled_from([INT64, BOOL])))])


@makes("Gather")
def gather(draw: Draw) -> Case:
    x = shape(draw, 1)
    return Case([Operand(x), Operand(shape(draw, 0, 3), INT64)], maybe(draw, {"axis": axis(draw, len(x))}))


@makes("GatherElements")
def gather_elements(draw: Draw) -> Case:
    x = shape(draw, 1)
    return Case([Operand(x), Operand(x, INT64)], maybe(draw, {"axis": axis(draw, len(x))}))


@makes("GatherND")
def gather_nd(draw: Draw) -> Case:
    x = shape(draw, 1, 5)
    batch = draw(st.integers(0, len(x) - 1))
    depth = draw(st.integers(1, len(x) - batch))
    between = shape(draw, 0, 2)
    return Case([Operand(x), Operand((*x[:batch], *between, depth), INT64)], {"batch_dims": batch})


@makes("Range")
def ranges(draw: Draw) -> Case:
    dtype = draw(st.sampled_from([FLOAT, INT64]))
    start, limit = draw(st.integers(-5, 5)), draw(st.integers(-5, 5))
    delta = draw(st.sampled_from([-3, -1, 1, 2]))
    made = [ints(n, dtype) for n in (start, limit, delta)]
    if draw(st.booleans()):
        made[1] = Operand((), dtype)
    return Case(made)


@makes("ConstantOfShape")
def constant_of_shape(draw: Draw) -> Case:
    if draw(st.booleans()):
        return Case([Operand((draw(st.integers(0, 3)),), INT64)])
    value = ir.Tensor(np.asarray([1], np.int32))
    return Case([ints(list(shape(draw)))], maybe(draw, {"value": value}))


@makes("EyeLike")
def eye_like(draw: Draw) -> Case:
    return Case([Operand(shape(draw, 2, 2))], maybe(draw, {"dtype": INT64}))


@makes("NonZero")
def non_zero(draw: Draw) -> Case:
    return Case([Operand(shape(draw))])


@makes("OneHot")
def one_hot(draw: Draw) -> Case:
    x = shape(draw, 1)
    depth = draw(st.sampled_from([ints(4), ints([4]), Operand((), INT64)]))
    return Case(
        [Operand(x, INT64), depth, Operand((2,), DOUBLE)], maybe(draw, {"axis": axis(draw, len(x) + 1)})
    )


@makes("Pad")
def pad(draw: Draw) -> Case:
    x = shape(draw, 1, empty=False)
    axes = some_axes(draw, len(x)) if draw(st.booleans()) else None
    count = 2 * (len(x) if axes is None else len(axes))
    pads = [draw(st.integers(0, 3)) for _ in range(count)]
    given = [Operand(x), ints(pads) if draw(st.booleans()) else Operand((count,), INT64)]
    return Case(given if axes is None else [*given, None, ints(axes)])


@makes("MatMul")
def matmul(draw: Draw) -> Case:
    m, k, n = size(draw), size(draw), size(draw)
    front = broadcasting(draw, 2)
    one = (*front[0], m, k) if draw(st.booleans()) else (k,)
    return Case([Operand(one), Operand((*front[1], k, n) if draw(st.booleans()) else (k,))])


@makes("Gemm")
def gemm(draw: Draw) -> Case:
    m, k, n = size(draw), size(draw), size(draw)
    left, right = flag(draw), flag(draw)
    bias = draw(st.sampled_from([(m, n), (n,), (1, n), (m, 1), (), (1,)]))
    given = [Operand((k, m) if left else (m, k)), Operand((n, k) if right else (k, n))]
    return Case([*given, *maybe(draw, [Operand(bias)])], {"transA": left, "transB": right})


EQUATIONS = "ab,bc->ac;ab, bc -> ca;ab,bc;aab->b;a...b,...bc->...ac;ba;...a->...;ab,ab->;ii->i"


@makes("Einsum")
def einsum(draw: Draw) -> Case:
    sizes = {letter: size(draw) for letter in "abcd"}
    equation = draw(st.sampled_from(EQUATIONS.split(";")))
    sizes["i"] = size(draw)
    left = equation.split("->")[0].replace(" ", "")
    extra = shape(draw, 0, 2, empty=False)
    made = []
    for term in left.split(","):
        dims: list[int] = []
        for part in term.replace("...", "."):
            dims += extra if part == "." else [sizes[part]]
        made.append(Operand(tuple(dims)))
    return Case(made, {"equation": equation})


def _windows(draw: Draw, rank: int, kernel: list[int], spatial: tuple[int, ...]) -> dict[str, Any]:
    """Strides, dilations and pads, or `auto_pad`; windows fit into the input."""
    made: dict[str, Any] = maybe(draw, {"strides": [size(draw, 3) for _ in range(rank)]})
    way = draw(st.sampled_from(["pads", "pads", "SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"]))
    if way != "pads":
        made["auto_pad"] = way
    else:
        made["pads"] = [draw(st.integers(0, 2)) for _ in range(2 * rank)]
    if way in ("pads", "NOTSET") and all(2 * (k - 1) < s for k, s in zip(kernel, spatial, strict=True)):
        made |= maybe(draw, {"dilations": [size(draw, 2) for _ in range(rank)]})
    return made


@makes("Conv")
def conv(draw: Draw) -> Case:
    rank, groups = size(draw, 3), size(draw, 2)
    spatial = tuple(draw(st.integers(4, 9)) for _ in range(rank))
    kernel = [size(draw, 4) for _ in range(rank)]
    channels, made = groups * size(draw, 3), groups * size(draw, 3)
    given = [Operand((size(draw), channels, *spatial)), Operand((made, channels // groups, *kernel))]
    attributes = (
        _windows(draw, rank, kernel, spatial) | {"group": groups} | maybe(draw, {"kernel_shape": kernel})
    )
    return Case([*given, *maybe(draw, [Operand((made,))])], attributes)


@makes("ConvTranspose")
def conv_transpose(draw: Draw) -> Case:
    rank, groups = size(draw, 3), size(draw, 2)
    spatial = tuple(draw(st.integers(4, 9)) for _ in range(rank))
    kernel = [draw(st.integers(2, 4)) for _ in range(rank)]
    channels = groups * size(draw, 3)
    attributes = _windows(draw, rank, kernel, spatial) | {"group": groups}
    strides = attributes.get("strides", [1] * rank)
    attributes |= maybe(draw, {"output_padding": [draw(st.integers(0, s - 1)) for s in strides]})
    if draw(st.integers(0, 3)) == 0:
        attributes["output_shape"] = [s * t + 1 for s, t in zip(spatial, strides, strict=True)]
    return Case(
        [Operand((size(draw), channels, *spatial)), Operand((channels, size(draw, 3), *kernel))], attributes
    )


@makes("MaxPool", "AveragePool", "LpPool")
def pool(draw: Draw) -> Case:
    rank = size(draw, 3)
    spatial = tuple(draw(st.integers(4, 9)) for _ in range(rank))
    kernel = [draw(st.integers(3, 4)) for _ in range(rank)]
    attributes = _windows(draw, rank, kernel, spatial) | {"kernel_shape": kernel, "ceil_mode": flag(draw)}
    return Case([Operand((size(draw), size(draw), *spatial))], attributes)


@makes("GlobalAveragePool", "GlobalMaxPool")
def global_pool(draw: Draw) -> Case:
    return Case([Operand(shape(draw, 3, 5, empty=False))])


@makes("Attention")
def attention(draw: Draw) -> Case:
    batch, heads, length, width = size(draw), size(draw), size(draw), size(draw)
    groups, keys, values = size(draw, 3), size(draw), size(draw)
    q, k, v = (
        (batch, heads * groups, length, width),
        (batch, heads, keys, width),
        (batch, heads, keys, values),
    )
    given: list[Operand | None] = [Operand(q), Operand(k), Operand(v)]
    outputs = 1
    if draw(st.booleans()):
        past = size(draw)
        given += [None, Operand((batch, heads, past, width)), Operand((batch, heads, past, values))]
        outputs = 3  # ONNX says 0 of the fourth where the past's length is known and the keys' is not
    return Case(given, {}, outputs)


@makes("Resize")
def resize(draw: Draw) -> Case:
    x = shape(draw, 1, empty=False)
    axes = maybe(draw, {"axes": some_axes(draw, len(x)) or [0]})
    rank = len(axes.get("axes", x))
    if draw(st.booleans()):
        sizes = [draw(st.integers(1, 12)) for _ in range(rank)]
        policy = draw(st.sampled_from(["not_larger", "not_smaller", "stretch"]))
        kept: dict[str, Any] = maybe(draw, {"keep_aspect_ratio_policy": policy})
        return Case([Operand(x), None, None, ints(sizes)], axes | kept)
    scales = np.asarray([draw(st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.7])) for _ in range(rank)], np.float32)
    return Case([Operand(x), None, Operand((rank,), FLOAT, scales)], axes)


@makes("GridSample")
def grid_sample(draw: Draw) -> Case:
    rank = draw(st.integers(2, 3))
    batch, spatial = size(draw), shape(draw, rank, rank, empty=False)
    out = shape(draw, rank, rank, empty=False)
    return Case([Operand((batch, size(draw), *spatial)), Operand((batch, *out, rank))])


@makes("DepthToSpace")
def depth_to_space(draw: Draw) -> Case:
    block = size(draw, 3)
    return Case([Operand((size(draw), size(draw) * block**2, size(draw), size(draw)))], {"blocksize": block})


@makes("SpaceToDepth")
def space_to_depth(draw: Draw) -> Case:
    block = size(draw, 3)
    return Case(
        [Operand((size(draw), size(draw), size(draw) * block, size(draw) * block))], {"blocksize": block}
    )


def _recurrent(gates: int, states: int) -> Maker:
    def make(draw: Draw) -> Case:
        length, batch, width, hidden = size(draw), size(draw), size(draw), size(draw)
        both = flag(draw)
        attributes: dict[str, Any] = {"hidden_size": hidden} | (
            {"direction": "bidirectional"} if both else {}
        )
        layout = flag(draw)
        attributes |= {"layout": layout} if layout else {}
        x = (batch, length, width) if layout else (length, batch, width)
        weights = [Operand((1 + both, gates * hidden, n)) for n in (width, hidden)]
        return Case([Operand(x), *weights], attributes, draw(st.integers(1, states)))

    return make


makes("RNN")(_recurrent(1, 2))
makes("GRU")(_recurrent(3, 2))
makes("LSTM")(_recurrent(4, 3))


@makes(
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
)
def reduce(draw: Draw) -> Case:
    x = shape(draw)
    attributes = maybe(draw, {"keepdims": flag(draw)}) | maybe(draw, {"noop_with_empty_axes": flag(draw)})
    way = draw(st.integers(0, 2))
    if way == 0:
        return Case([Operand(x)], attributes)
    axes = some_axes(draw, len(x))
    return Case([Operand(x), ints(axes) if way == 1 else Operand((len(axes),), INT64)], attributes)


@makes("ArgMax", "ArgMin")
def arg_reduce(draw: Draw) -> Case:
    x = shape(draw, 1, empty=False)
    return Case(
        [Operand(x)], maybe(draw, {"axis": axis(draw, len(x))}) | maybe(draw, {"keepdims": flag(draw)})
    )


@makes("TopK")
def topk(draw: Draw) -> Case:
    x = shape(draw, 1, empty=False)
    at = axis(draw, len(x))
    count = ints([draw(st.integers(0, x[at]))]) if draw(st.booleans()) else Operand((1,), INT64)
    return Case([Operand(x), count], {"axis": at}, 2)


@makes("Unique")
def unique(draw: Draw) -> Case:
    x = shape(draw, 1, empty=False)
    return Case([Operand(x)], maybe(draw, {"axis": axis(draw, len(x))}), draw(st.integers(1, 4)))


@makes("Dropout")
def dropout(draw: Draw) -> Case:
    return Case([Operand(shape(draw))], {}, draw(st.integers(1, 2)))


@makes("Shape")
def shape_of(draw: Draw) -> Case:
    ends = st.integers(-6, 6)
    return Case([Operand(shape(draw))], maybe(draw, {"start": draw(ends)}) | maybe(draw, {"end": draw(ends)}))


@makes("Size")
def size_of(draw: Draw) -> Case:
    return Case([Operand(shape(draw))])


@makes("Reshape")
def reshape(draw: Draw) -> Case:
    x = shape(draw)
    if draw(st.booleans()):
        return Case([Operand(x), Operand((draw(st.integers(0, 4)),), INT64)])
    if draw(st.booleans()):
        return Case([Operand(x), ints(list(x))], {"allowzero": 1})
    x = tuple(max(d, 1) for d in x)
    target = list(x)
    for i in range(len(target)):
        if draw(st.booleans()):
            target[i] = 0
    if draw(st.booleans()) and target:
        target[draw(st.integers(0, len(target) - 1))] = -1
    elif draw(st.booleans()):
        target.append(1)
    return Case([Operand(x), ints(target)])


@makes("Flatten")
def flatten(draw: Draw) -> Case:
    x = shape(draw)
    return Case([Operand(x)], {"axis": draw(st.integers(-len(x), len(x)))})


@makes("Transpose")
def transpose(draw: Draw) -> Case:
    x = shape(draw)
    return Case([Operand(x)], maybe(draw, {"perm": draw(st.permutations(range(len(x))))}) if x else {})


@makes("Unsqueeze")
def unsqueeze(draw: Draw) -> Case:
    x = shape(draw, 0, 3)
    rank = len(x) + draw(st.integers(0, 2))
    places = draw(st.permutations(range(rank)))[: rank - len(x)]
    return Case([Operand(x), ints([i - rank if draw(st.booleans()) else i for i in places])])


@makes("Squeeze")
def squeeze(draw: Draw) -> Case:
    x = list(shape(draw))
    axes = some_axes(draw, len(x))
    for i in axes:
        x[i] = 1
    return Case([Operand(tuple(x)), *([ints(axes)] if draw(st.booleans()) else [])])


@makes("Expand")
def expand(draw: Draw) -> Case:
    one, two = broadcasting(draw, 2)
    return Case([Operand(one), ints(list(two)) if draw(st.booleans()) else Operand((len(two),), INT64)])


@makes("Tile")
def tile(draw: Draw) -> Case:
    x = shape(draw)
    repeats = [draw(st.integers(0, 3)) for _ in x]
    return Case([Operand(x), ints(repeats) if draw(st.booleans()) else Operand((len(x),), INT64)])


@makes("Concat")
def concat(draw: Draw) -> Case:
    x = list(shape(draw, 1))
    at = axis(draw, len(x))
    made = []
    for _ in range(size(draw, 3)):
        x[at] = size(draw)
        made.append(Operand(tuple(x)))
    return Case(made, {"axis": at})


@makes("Split")
def split(draw: Draw) -> Case:
    x = list(shape(draw, 1))
    at, count = axis(draw, len(x)), size(draw, 3)
    if draw(st.booleans()):
        sizes = [size(draw) for _ in range(count)]
        x[at] = sum(sizes)
        return Case([Operand(tuple(x)), ints(sizes)], {"axis": at}, count)
    x[at] = count * size(draw) + (draw(st.integers(0, count - 1)) if count < 3 else 0)
    return Case([Operand(tuple(x))], {"axis": at, "num_outputs": count}, count)


@makes("Slice")
def slices(draw: Draw) -> Case:
    x = shape(draw, 1)
    picked = some_axes(draw, len(x))
    axes = picked if draw(st.booleans()) else None
    count = len(x) if axes is None else len(axes)
    ends = st.one_of(st.integers(-7, 7), st.sampled_from([2**62, -(2**62)]))
    given: list[Operand | None] = [Operand(x)]
    given += [ints([draw(ends) for _ in range(count)]) for _ in range(2)]
    if axes is None and draw(st.booleans()):
        return Case(given)
    steps = ints([draw(st.sampled_from([-2, -1, 1, 3])) for _ in range(count)])
    return Case([*given, None if axes is None else ints(axes), *maybe(draw, [steps])])


@makes("QuantizeLinear")
def quantize(draw: Draw) -> Case:
    zero = draw(st.sampled_from([None, Operand((), ir.DataType.INT8), Operand((), ir.DataType.UINT8)]))
    return Case([Operand(shape(draw, 2, empty=False)), Operand(()), zero])


@makes("DequantizeLinear")
def dequantize(draw: Draw) -> Case:
    x = Operand(shape(draw, 2, empty=False), ir.DataType.UINT8)
    return Case([x, Operand((), draw(st.sampled_from([FLOAT, ir.DataType.FLOAT16])))])

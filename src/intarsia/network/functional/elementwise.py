"""Functionals that work element by element, with ONNX's broadcasting, or reduce along axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from intarsia.network.functional.core import DTypeLike, Operand, as_dtype, constant, ints, op, ops
from intarsia.network.functional.shape import Size, size_vector
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature, single_layer

Unary = Callable[[Operand], Tensor]
Binary = Callable[[Operand, Operand], Tensor]


def _unary(op_type: str, name: str | None = None) -> Unary:
    """A functional of one operand."""

    def functional(x: Operand) -> Tensor:
        return op(op_type, x)

    functional.__name__ = functional.__qualname__ = name or op_type.lower()
    functional.__doc__ = f"ONNX `{op_type}`, elementwise."
    single_layer(op_type, functional)
    return functional


def _binary(op_type: str, name: str | None = None) -> Binary:
    """A functional of two operands of one dtype."""

    def functional(a: Operand, b: Operand) -> Tensor:
        return op(op_type, a, b)

    functional.__name__ = functional.__qualname__ = name or op_type.lower()
    functional.__doc__ = f"ONNX `{op_type}` of two operands of one dtype; a scalar gets the other's dtype."
    single_layer(op_type, functional)
    return functional


abs: Unary = _unary("Abs")
acos: Unary = _unary("Acos")
acosh: Unary = _unary("Acosh")
asin: Unary = _unary("Asin")
asinh: Unary = _unary("Asinh")
atan: Unary = _unary("Atan")
atanh: Unary = _unary("Atanh")
ceil: Unary = _unary("Ceil")
floor: Unary = _unary("Floor")
round: Unary = _unary("Round")
cos: Unary = _unary("Cos")
cosh: Unary = _unary("Cosh")
sin: Unary = _unary("Sin")
sinh: Unary = _unary("Sinh")
tan: Unary = _unary("Tan")
tanh: Unary = _unary("Tanh")
erf: Unary = _unary("Erf")
exp: Unary = _unary("Exp")
log: Unary = _unary("Log")
sqrt: Unary = _unary("Sqrt")
identity: Unary = _unary("Identity")
neg: Unary = _unary("Neg")
sign: Unary = _unary("Sign")
reciprocal: Unary = _unary("Reciprocal")
relu: Unary = _unary("Relu")
sigmoid: Unary = _unary("Sigmoid")
softplus: Unary = _unary("Softplus")
softsign: Unary = _unary("Softsign")
hardswish: Unary = _unary("HardSwish")
mish: Unary = _unary("Mish")
logical_not: Unary = _unary("Not", "logical_not")
bitwise_not: Unary = _unary("BitwiseNot", "bitwise_not")
isnan: Unary = _unary("IsNaN")
isinf: Unary = _unary("IsInf")

add: Binary = _binary("Add")
sub: Binary = _binary("Sub")
mul: Binary = _binary("Mul")
div: Binary = _binary("Div")
pow: Binary = _binary("Pow")
maximum: Binary = _binary("Max", "maximum")
minimum: Binary = _binary("Min", "minimum")
equal: Binary = _binary("Equal")
greater: Binary = _binary("Greater")
less: Binary = _binary("Less")
greater_equal: Binary = _binary("GreaterOrEqual", "greater_equal")
less_equal: Binary = _binary("LessOrEqual", "less_equal")
logical_and: Binary = _binary("And", "logical_and")
logical_or: Binary = _binary("Or", "logical_or")
logical_xor: Binary = _binary("Xor", "logical_xor")
bitwise_and: Binary = _binary("BitwiseAnd", "bitwise_and")
bitwise_or: Binary = _binary("BitwiseOr", "bitwise_or")
bitwise_xor: Binary = _binary("BitwiseXor", "bitwise_xor")


@record_signature
def mod(a: Operand, b: Operand, *, fmod: bool = False) -> Tensor:
    """ONNX `Mod`. With `fmod` the sign is the dividend's, as in C; else the divisor's (integers only)."""
    return op("Mod", a, b, fmod=1 if fmod else None)


@record_signature
def cast(x: Operand, dtype: DTypeLike) -> Tensor:
    """`x` in another dtype; no layer if it has that dtype."""
    wanted = as_dtype(dtype)
    if isinstance(x, Tensor) and x.dtype == wanted:
        return x
    return op("Cast", x, to=wanted)


@record_signature
def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """`a` where the condition holds, else `b`."""
    like = next((v.dtype for v in (a, b) if isinstance(v, Tensor)), None)
    left = a if isinstance(a, Tensor) else constant(a, like)
    right = b if isinstance(b, Tensor) else constant(b, like)
    return op("Where", condition, left, right)


@record_signature
def clip(x: Tensor, low: Operand | None = None, high: Operand | None = None) -> Tensor:
    """`x` clamped between two optional 0-d bounds."""
    return op("Clip", x, low, high)


@record_signature
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, exact or with the `tanh` approximation."""
    return op("Gelu", x, approximate=approximate)


@record_signature
def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    return op("Mul", x, op("Sigmoid", x))


@record_signature
def leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    """`x` where positive, else `alpha * x`."""
    return op("LeakyRelu", x, alpha=float(alpha))


@record_signature
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """`x` where positive, else `alpha * (exp(x) - 1)`."""
    return op("Elu", x, alpha=float(alpha))


@record_signature
def prelu(x: Tensor, slope: Operand) -> Tensor:
    """`x` where positive, else `slope * x`, the slope broadcast to x."""
    return op("PRelu", x, slope)


@record_signature
def hardsigmoid(x: Tensor, alpha: float = 1 / 6, beta: float = 0.5) -> Tensor:
    """`alpha * x + beta`, clamped between 0 and 1."""
    return op("HardSigmoid", x, alpha=float(alpha), beta=float(beta))


# Functionals that reduce or order along axes.


Reduce = Callable[..., Tensor]


def _reduce(op_type: str) -> Reduce:
    def functional(x: Tensor, axes: Sequence[int] | None = None, *, keepdims: bool = True) -> Tensor:
        return op(op_type, x, None if axes is None else ints(axes), keepdims=1 if keepdims else 0)

    functional.__name__ = functional.__qualname__ = "reduce_" + op_type.removeprefix("Reduce").lower()
    functional.__doc__ = f"ONNX `{op_type}` over axes, or over all of them."
    return record_signature(functional)


reduce_sum: Reduce = _reduce("ReduceSum")
reduce_mean: Reduce = _reduce("ReduceMean")
reduce_prod: Reduce = _reduce("ReduceProd")
reduce_max: Reduce = _reduce("ReduceMax")
reduce_min: Reduce = _reduce("ReduceMin")
reduce_l2: Reduce = _reduce("ReduceL2")
reduce_sumsquare: Reduce = _reduce("ReduceSumSquare")
reduce_logsumexp: Reduce = _reduce("ReduceLogSumExp")


@record_signature
def argmax(x: Tensor, axis: int, *, keepdims: bool = False) -> Tensor:
    """Index of the first largest element."""
    return op("ArgMax", x, axis=axis, keepdims=1 if keepdims else 0)


@record_signature
def argmin(x: Tensor, axis: int, *, keepdims: bool = False) -> Tensor:
    """Index of the first smallest element."""
    return op("ArgMin", x, axis=axis, keepdims=1 if keepdims else 0)


@record_signature
def topk(
    x: Tensor, k: Size, axis: int = -1, *, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements and their indices."""
    values, indices = ops(
        "TopK", x, size_vector([k]), outputs=2, axis=axis, largest=int(largest), sorted=int(sorted)
    )
    return values, indices


@record_signature
def cumsum(x: Tensor, axis: int) -> Tensor:
    """Running sum along an axis."""
    return op("CumSum", x, constant(axis, ir.DataType.INT64))


@record_signature
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Softmax along an axis."""
    return op("Softmax", x, axis=axis)


@record_signature
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of softmax, numerically stable."""
    return op("LogSoftmax", x, axis=axis)

"""Functionals that work element by element, with ONNX's broadcasting."""

from __future__ import annotations

from collections.abc import Callable

from intarsia.network.functional.core import DTypeLike, Operand, as_dtype, constant, op
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature, single_layer

Unary = Callable[[Operand], Tensor]
Binary = Callable[[Operand, Operand], Tensor]


def _unary(op_type: str, name: str | None = None) -> Unary:
    """A functional of one operand."""

    def functional(x: Operand) -> Tensor:
        return op(op_type, x)

    functional.__name__ = functional.__qualname__ = name or op_type.lower()
    functional.__doc__ = f"ONNX `{op_type}`, element by element."
    single_layer(op_type, functional)
    return functional


def _binary(op_type: str, name: str | None = None) -> Binary:
    """A functional of two operands of one dtype."""

    def functional(a: Operand, b: Operand) -> Tensor:
        return op(op_type, a, b)

    functional.__name__ = functional.__qualname__ = name or op_type.lower()
    functional.__doc__ = f"ONNX `{op_type}` of two operands of one dtype; a scalar takes the other's."
    single_layer(op_type, functional)
    return functional


abs = _unary("Abs")
acos, acosh, asin, asinh = _unary("Acos"), _unary("Acosh"), _unary("Asin"), _unary("Asinh")
atan, atanh = _unary("Atan"), _unary("Atanh")
ceil, floor, round = _unary("Ceil"), _unary("Floor"), _unary("Round")
cos, cosh, sin, sinh, tan, tanh = (_unary(name) for name in ("Cos", "Cosh", "Sin", "Sinh", "Tan", "Tanh"))
erf, exp, log, sqrt = _unary("Erf"), _unary("Exp"), _unary("Log"), _unary("Sqrt")
identity = _unary("Identity")
neg, sign, reciprocal = _unary("Neg"), _unary("Sign"), _unary("Reciprocal")
relu, sigmoid, softplus, softsign = _unary("Relu"), _unary("Sigmoid"), _unary("Softplus"), _unary("Softsign")
hardswish, mish = _unary("HardSwish"), _unary("Mish")
logical_not, bitwise_not = _unary("Not", "logical_not"), _unary("BitwiseNot", "bitwise_not")
isnan, isinf = (_unary(name) for name in ("IsNaN", "IsInf"))

add, sub, mul, div, pow = (_binary(name) for name in ("Add", "Sub", "Mul", "Div", "Pow"))
maximum, minimum = _binary("Max", "maximum"), _binary("Min", "minimum")
equal, greater, less = (_binary(name) for name in ("Equal", "Greater", "Less"))
greater_equal = _binary("GreaterOrEqual", "greater_equal")
less_equal = _binary("LessOrEqual", "less_equal")
logical_and = _binary("And", "logical_and")
logical_or = _binary("Or", "logical_or")
logical_xor = _binary("Xor", "logical_xor")
bitwise_and, bitwise_or = _binary("BitwiseAnd", "bitwise_and"), _binary("BitwiseOr", "bitwise_or")
bitwise_xor = _binary("BitwiseXor", "bitwise_xor")


@record_signature
def mod(a: Operand, b: Operand, *, fmod: bool = False) -> Tensor:
    """ONNX `Mod`: with `fmod` the sign follows the dividend (C's fmod), else the divisor (integers only)."""
    return op("Mod", a, b, fmod=1 if fmod else None)


@record_signature
def cast(x: Operand, dtype: DTypeLike) -> Tensor:
    """`x` in another dtype; no layer if it has it already."""
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
    """`x` kept between two 0-d bounds, either of which may be left out."""
    return op("Clip", x, low, high)


@record_signature
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, exact or by `tanh`."""
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
    """`alpha * x + beta` kept between 0 and 1."""
    return op("HardSigmoid", x, alpha=float(alpha), beta=float(beta))

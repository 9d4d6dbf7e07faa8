"""Functions of one tensor, element by element, with the error and gamma functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.context import Context, narrowed, promoted, promoted_wide, wide
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten

Formula = Callable[[Tensor], Tensor]


def expm1(x: Tensor) -> Tensor:
    """`exp(x) - 1` that keeps its digits near zero: tanh(x/2) = (e^x - 1) / (e^x + 1)."""
    return F.mul(F.tanh(F.mul(x, 0.5)), F.add(F.exp(x), 1.0))


def log1p(x: Tensor) -> Tensor:
    """`log(1 + x)` that keeps its digits near zero: log(1 + x) = 2 atanh(x / (2 + x))."""
    near = F.mul(F.atanh(F.div(x, F.add(x, 2.0))), 2.0)
    return F.where(F.less(F.abs(x), 0.5), near, F.log(F.add(x, 1.0)))


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`; far below zero by its series, where OpenVINO's layer even turns negative."""
    if x.dtype != ir.DataType.FLOAT:
        return F.softplus(x)  # the series has the digits of float32
    small = F.exp(x)
    series = F.mul(small, F.sub(1.0, F.mul(small, 0.5)))
    return F.where(F.less(x, -8.0), series, F.softplus(x))


def trunc(x: Tensor) -> Tensor:
    """`x` rounded towards zero."""
    return F.where(F.less(x, 0.0), F.ceil(x), F.floor(x))


_ONE_LAYER = """abs acos acosh asin asinh atan atanh cos cosh erf exp hardswish log mish neg reciprocal
 sigmoid sin sinh sqrt tan tanh"""
# One layer each; integers and booleans become floats first where they do in torch.
_LAYERS: dict[str, Formula] = {
    **{name: getattr(F, name) for name in _ONE_LAYER.split()},
    "absolute": F.abs,
    "negative": F.neg,
    "square": lambda x: F.mul(x, x),
}
# Several layers each, so halves are computed in float32.
_FORMULAS: dict[str, Formula] = {
    "exp2": lambda x: F.pow(F.constant(2.0, x.dtype), x),
    "expm1": expm1,
    "hardsigmoid": F.hardsigmoid,  # a sixth is not the same in halves
    "log10": lambda x: F.mul(F.log(x), 1 / math.log(10)),
    "log1p": log1p,
    "log2": lambda x: F.mul(F.log(x), 1 / math.log(2)),
    "rsqrt": lambda x: F.reciprocal(F.sqrt(x)),
    "silu": F.silu,
}
# Nothing to do to integers.
_ROUNDINGS: dict[str, Formula] = {"ceil": F.ceil, "floor": F.floor, "round": F.round, "trunc": trunc}


@converter(*(getattr(aten, name).default for name in (*_LAYERS, *_FORMULAS, *_ROUNDINGS)))
def unary(ctx: Context, self: Tensor) -> Tensor:
    name = ctx.operator
    if name in _ROUNDINGS and self.dtype not in dtypes.FLOATS:
        return self
    if name in _FORMULAS:
        return narrowed(ctx, _FORMULAS[name](*promoted_wide(ctx, self)))
    return narrowed(ctx, {**_LAYERS, **_ROUNDINGS}[name](*promoted(ctx, self)))


@converter(aten.sign.default, aten.sgn.default)
def sign(ctx: Context, self: Tensor) -> Tensor:
    if self.dtype == ir.DataType.BOOL:
        return self
    if self.dtype not in dtypes.FLOATS:
        return kernels.sign(self)
    (x,) = promoted(ctx, self)
    return narrowed(ctx, F.where(F.isnan(x), 0.0, F.sign(x)))  # torch gives a NaN no sign


@converter(aten.signbit.default)
def signbit(ctx: Context, self: Tensor) -> Tensor:
    if self.dtype == ir.DataType.BOOL or self.dtype in dtypes.UNSIGNED:
        return F.logical_not(F.equal(self, self))
    return is_negative(F.cast(self, wide(self.dtype)))


def is_negative(x: Tensor) -> Tensor:
    """Whether the sign is minus, which a zero can have too."""
    if x.dtype not in dtypes.FLOATS:
        return F.less(x, 0)
    return F.logical_or(F.less(x, 0.0), F.less(F.reciprocal(x), 0.0))


@converter(aten.round.decimals)
def round_decimals(ctx: Context, self: Tensor, decimals: int = 0) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return self
    (x,) = promoted_wide(ctx, self)
    scale = float(10 ** max(decimals, -decimals))
    if decimals < 0:
        return narrowed(ctx, F.mul(F.round(F.div(x, scale)), scale))
    return narrowed(ctx, F.div(F.round(F.mul(x, scale)), scale))


@converter(aten.logit.default, aten.special_logit.default)
def logit(ctx: Context, self: Tensor, eps: float | None = None) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    if eps is not None:
        low, high = F.constant(eps, x.dtype), F.constant(1.0 - eps, x.dtype)
        x = F.where(F.less(x, low), low, F.where(F.less(high, x), high, x))  # a NaN stays one
    return narrowed(ctx, F.log(F.div(x, F.sub(1.0, x))))


# Error and gamma functions that engines have no layer for, by formulas that keep float32's digits.

# (1 + 2x) erfc(x) exp(x^2) for x in [0, 12], as a polynomial of t = (x - 2) / (x + 2).
_ERFCX = (
    1.27697839,
    -0.0927640956,
    -0.166031609,
    0.164057389,
    -0.0542012082,
    -0.00806815746,
    0.00861700688,
    0.00131964504,
    -0.00120987333,
    -0.000392063303,
)
# lgamma(x) / (x - 2) for x in [1.5, 3], as a polynomial of x - 2.25.
_LGAMMA = (
    0.499486858,
    0.292238276,
    -0.0542952297,
    0.0146918905,
    -0.00466506474,
    0.00159259643,
    -0.000578343264,
    0.000273895542,
    -0.000109601995,
)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """The lowest power first."""
    result: Tensor | float = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        result = F.add(F.mul(result, x), coefficient)
    assert isinstance(result, Tensor)
    return result


def _single(ctx: Context, self: Tensor) -> Tensor:
    """The operand in float32, whose digits the formulas have."""
    (x,) = promoted_wide(ctx, self)
    if x.dtype != ir.DataType.FLOAT:
        raise ConversionError(f"{x.dtype.name} is not handled: the formula has float32's digits")
    return x


def _erfc(x: Tensor) -> Tensor:
    """`1 - erf(x)` that is accurate where the result is small.

    exp(-x^2) is taken apart: of x rounded to 1/128 the square is exact, and the rest is small.
    """
    size = F.abs(x)
    size = F.where(F.greater(size, 12.0), 12.0, size)  # nothing is left there
    polynomial = _polynomial(F.div(F.sub(size, 2.0), F.add(size, 2.0)), _ERFCX)
    scaled = F.div(polynomial, F.add(F.mul(size, 2.0), 1.0))
    coarse = F.div(F.round(F.mul(size, 128.0)), 128.0)
    rest = F.mul(F.sub(size, coarse), F.add(size, coarse))
    tail = F.mul(F.mul(F.exp(F.neg(F.mul(coarse, coarse))), F.exp(F.neg(rest))), scaled)
    return F.where(F.isnan(x), x, F.where(F.less(x, 0.0), F.sub(2.0, tail), tail))


@converter(aten.erfc.default, aten.special_erfc.default)
def erfc(ctx: Context, self: Tensor) -> Tensor:
    return narrowed(ctx, _erfc(_single(ctx, self)))


def _turn(x: Tensor) -> Tensor:
    """`pi x` less whole multiples of pi: `x` may be far from zero, the angle is not."""
    return F.mul(F.sub(x, F.round(x)), math.pi)


def _is_pole(x: Tensor) -> Tensor:
    """Zero and the negative integers; all floats of large magnitude are integers."""
    return F.logical_and(F.equal(F.round(x), x), F.less(x, 0.5))


@converter(aten.lgamma.default, aten.special_gammaln.default)
def lgamma(ctx: Context, self: Tensor) -> Tensor:
    """The logarithm of the gamma function's size.

    Below 1/2 by reflection, up to 3/2 one step further, up to 3 by a polynomial, beyond by Stirling's series.
    """
    x = _single(ctx, self)
    below = F.less(x, 0.5)
    mirrored = F.where(below, F.sub(1.0, x), x)
    small = F.less(mirrored, 1.5)
    shifted = F.where(small, F.add(mirrored, 1.0), mirrored)
    near = F.mul(F.sub(shifted, 2.0), _polynomial(F.sub(shifted, 2.25), _LGAMMA))
    inverse = F.reciprocal(shifted)
    series = _polynomial(F.mul(inverse, inverse), (1 / 12, -1 / 360, 1 / 1260, -1 / 1680))
    leading = F.mul(F.sub(shifted, 0.5), F.sub(F.log(shifted), 1.0))
    far = F.add(leading, F.add(F.mul(inverse, series), 0.5 * math.log(2 * math.pi) - 0.5))
    value = F.where(F.less(shifted, 3.0), near, far)
    value = F.where(small, F.sub(value, F.log(mirrored)), value)
    reflected = F.sub(F.sub(math.log(math.pi), F.log(F.abs(F.sin(_turn(x))))), value)
    result = F.where(below, reflected, value)
    # Near zero gamma is 1 / x; the sine of a denormal has few bits.
    result = F.where(F.less(F.abs(x), 2.0**-40), F.neg(F.log(F.abs(x))), result)
    return narrowed(ctx, F.where(_is_pole(x), math.inf, result))


@converter(aten.digamma.default, aten.special_digamma.default, aten.special_psi.default)
def digamma(ctx: Context, self: Tensor) -> Tensor:
    """The slope of lgamma: below 1/2 by reflection, else six steps further by its series."""
    x = _single(ctx, self)
    below = F.less(x, 0.5)
    mirrored = F.where(below, F.sub(1.0, x), x)
    steps: Tensor = F.reciprocal(mirrored)
    for step in range(1, 6):
        steps = F.add(steps, F.reciprocal(F.add(mirrored, float(step))))
    shifted = F.add(mirrored, 6.0)
    square = F.reciprocal(F.mul(shifted, shifted))
    series = F.mul(square, _polynomial(square, (-1 / 12, 1 / 120, -1 / 252)))
    far = F.add(F.sub(F.log(shifted), F.div(0.5, shifted)), series)
    value = F.sub(far, steps)
    reflected = F.sub(value, F.div(math.pi, F.tan(_turn(x))))
    result = F.where(below, reflected, value)
    # Of a pole torch gives the side at zero alone: there a plain quotient has it, elsewhere nothing has.
    at_pole = F.where(F.equal(x, 0.0), F.div(-1.0, x), math.nan)
    return narrowed(ctx, F.where(_is_pole(x), at_pole, result))

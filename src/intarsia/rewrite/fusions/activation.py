"""Activations from their formulas: GELU exact, by tanh and by sigmoid, SiLU, bias with GELU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from intarsia.network import Network, Tensor
from intarsia.network import functional as F
from intarsia.network.value import MICROSOFT
from intarsia.rewrite.fusions.fusion import Fusion, given, weight
from intarsia.rewrite.pattern import refuse, rule

_ROOT_TWO = math.sqrt(2)
_TANH_SCALE = math.sqrt(2 / math.pi)


def _half_of(op: Any, x: Any, gate: Any) -> Any:
    """0.5 * x * gate in every order of the factors."""
    return op.either(op.Mul(op.Mul(x, 0.5), gate), op.Mul(op.Mul(x, gate), 0.5), op.Mul(x, op.Mul(gate, 0.5)))


def _by_erf(op: Any, x: Any) -> Any:
    inside = op.either(op.Div(x, _ROOT_TWO), op.Mul(x, 1 / _ROOT_TWO))
    return _half_of(op, x, op.Add(op.Erf(inside), 1.0))


@rule(_by_erf)
def gelu_exact(net: Network, x: Tensor) -> Tensor:
    """x * 0.5 * (1 + erf(x / sqrt(2)))."""
    return F.gelu(x)


def _by_tanh(op: Any, x: Any) -> Any:
    cube = op.either(op.Pow(x, 3.0), op.Mul(op.Mul(x, x), x))
    inside = op.Mul(op.Add(x, op.Mul(cube, 0.044715)), _TANH_SCALE)
    return _half_of(op, x, op.Add(op.Tanh(inside), 1.0))


@rule(_by_tanh)
def gelu_tanh(net: Network, x: Tensor) -> Tensor:
    """x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))."""
    return F.gelu(x, approximate="tanh")


def _erf_written(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((64, 1024) if large else (2, "n")))
    inside = x / _ROOT_TWO if rng.integers(2) else x * (1 / _ROOT_TWO)
    _write_half(x, F.erf(inside) + 1.0, int(rng.integers(3)))


def _tanh_written(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((64, 1024) if large else (2, "n")))
    cube = F.pow(x, 3.0) if rng.integers(2) or large else x * x * x
    _write_half(x, F.tanh((x + cube * 0.044715) * _TANH_SCALE) + 1.0, int(rng.integers(3)))


def _write_half(x: Tensor, gate: Tensor, way: int) -> None:
    product = (x * 0.5) * gate if way == 0 else (x * gate) * 0.5 if way == 1 else x * (gate * 0.5)
    product.mark_output("y")


@rule(lambda op, x: op.Mul(x, op.Sigmoid(x)))
def silu(net: Network, x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return F.op("QuickGelu", x, domain=MICROSOFT, alpha=1.0)


@rule(lambda op, x: op.Mul(x, op.Sigmoid(op.Mul(x, 1.702))))
def quick_gelu(net: Network, x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x)."""
    return F.op("QuickGelu", x, domain=MICROSOFT, alpha=1.702)


def _silu_written(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((64, 1024) if large else (2, "n")))
    (x * F.sigmoid(x)).mark_output("y")


def _quick_written(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((64, 1024) if large else (2, "n")))
    (x * F.sigmoid(x * 1.702)).mark_output("y")


@rule(lambda op, x, b: op.Gelu(op.Add(x, op.constant(b))))
def bias_gelu(net: Network, x: Tensor, b: Tensor) -> object:
    """An exact GELU of a sum with a bias."""
    if b.ndim != 1 or b.shape[0] != x.shape[-1] or b.shape[0] == 1:
        return refuse(f"the bias is {list(b.shape)}, the input {list(x.shape)}")
    return F.op("BiasGelu", x, b, domain=MICROSOFT)


def _bias_gelu_written(rng: np.random.Generator, large: bool) -> None:
    width = 1024 if large else 5
    x = given("x", 64 if large else 2, width)
    F.gelu(x + weight(rng, width)).mark_output("y")


FUSIONS = (
    Fusion("gelu_exact", gelu_exact, _erf_written, 60),
    Fusion("gelu_tanh", gelu_tanh, _tanh_written, 60),
    Fusion("quick_gelu", quick_gelu, _quick_written, 60, group=MICROSOFT),
    Fusion("silu", silu, _silu_written, 55, group=MICROSOFT),
    Fusion("bias_gelu", bias_gelu, _bias_gelu_written, 40, group=MICROSOFT),
)

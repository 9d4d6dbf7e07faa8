"""Operands of any two dtypes, tensors, 0-d tensors and Python numbers: torch's dtype and torch's values."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.convert.one_node import answers

aten = torch.ops.aten
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
ARITHMETIC = [
    (aten.add.Tensor, {}),
    (aten.add.Tensor, {"alpha": 2}),
    (aten.sub.Tensor, {}),
    (aten.rsub.Scalar, {}),
    (aten.mul.Tensor, {}),
    (aten.div.Tensor, {}),
    (aten.div.Tensor_mode, {"rounding_mode": "floor"}),
    (aten.div.Tensor_mode, {"rounding_mode": "trunc"}),
    (aten.floor_divide.default, {}),
    (aten.remainder.Tensor, {}),
    (aten.fmod.Tensor, {}),
    (aten.maximum.default, {}),
    (aten.minimum.default, {}),
    (aten.fmax.default, {}),
    (aten.atan2.default, {}),
    (aten.copysign.Tensor, {}),
    (aten.xlogy.Tensor, {}),
    (aten.bitwise_and.Tensor, {}),
    (aten.bitwise_or.Tensor, {}),
    (aten.bitwise_left_shift.Tensor, {}),
    (aten.bitwise_right_shift.Tensor, {}),
    (aten.logical_xor.default, {}),
    (aten.eq.Tensor, {}),
    (aten.ne.Tensor, {}),
    (aten.lt.Tensor, {}),
    (aten.le.Tensor, {}),
    (aten.gt.Tensor, {}),
    (aten.ge.Tensor, {}),
    (aten.clamp_min.Tensor, {}),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tensor(dtype: torch.dtype, zero_d: bool, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = () if zero_d else (3, 4)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        # Eighths are exact in every dtype, so that rounding happens in the operation alone.
        return (torch.randint(-40, 40, shape, generator=generator) / 8).to(dtype)
    low = 0 if dtype == torch.uint8 else -100
    return torch.randint(low, 100, shape, generator=generator).to(dtype)


tensors = st.builds(tensor, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 5))
operands = st.one_of(tensors, st.sampled_from([True, 2, -3, 0.5, 3]))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(ARITHMETIC), tensors, operands)
def test_two_operands(op: tuple[Any, dict[str, Any]], a: torch.Tensor, b: Any) -> None:
    target, kwargs = op
    try:
        target(a, b, **kwargs)
    except (RuntimeError, TypeError):
        reject()  # torch does not take these dtypes together, or divides by zero
    check(*answers(target, a, b, **kwargs))


@settings(deadline=None, max_examples=150)
@given(st.booleans(), tensors, operands)
def test_where(condition: bool, a: torch.Tensor, b: Any) -> None:
    mask = tensor(torch.bool, condition, 2)
    target = aten.where.self if isinstance(b, torch.Tensor) else aten.where.ScalarOther
    check(*answers(target, mask, a, b))


def check(answer: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE.get(expected.dtype, 1e-5)
    torch.testing.assert_close(answer, expected, rtol=tolerance, atol=tolerance, equal_nan=True)

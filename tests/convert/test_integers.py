"""Integers beyond what floats hold: sums, products and remainders are exact, and wrap as torch's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.convert.programs import answers, answers_of_both, assert_equal
from torch.export import Dim

from intarsia.errors import EngineError, GuardError

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
LIMITS = torch.iinfo(torch.int64)
LARGE = torch.randint(LIMITS.min, LIMITS.max, (5, 7, 3), generator=G)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.sum.default, ()),
        (aten.sum.dim_IntList, ([1],)),
        (aten.sum.dim_IntList, ([0, 2], True)),
        (aten.nansum.default, ([1],)),
        (aten.prod.default, ()),
        (aten.prod.dim_int, (1,)),
        (aten.cumsum.default, (1,)),
        (aten.fmod.Tensor, (LARGE.flip(0) // 3 + 1,)),
        (aten.remainder.Tensor, (LARGE.flip(0) // 3 + 1,)),
    ],
)
def test_exact(target: Any, args: tuple[Any, ...]) -> None:
    have, want = answers(target, LARGE, *args)
    assert torch.equal(have, want)
    small = (LARGE >> 40).to(torch.int32)
    have, want = answers(target, small, *(a >> 42 | 1 if isinstance(a, torch.Tensor) else a for a in args))
    assert torch.equal(have, want)


def test_sums_at_any_size() -> None:
    calls = [(LARGE[:, :n].contiguous(),) for n in (4, 7, 1, 0)]
    assert_equal(
        lambda x: x.sum(1), *calls, dynamic=({1: Dim("n", min=0, max=64)},), engines=("onnxruntime",)
    )


INT64 = [-(2**63), -(2**62) - 7, -(2**53) - 1, -(2**32), -(2**31) - 1, -(2**31), -(2**24), -5, -1, 0, 1, 7]
INT64 += [2**24 + 1, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1, 2**32, 3 * 2**31, 2**53 + 1, 2**62, 2**63 - 1]
EDGES = torch.tensor(INT64)
LEFT, RIGHT = (t.contiguous() for t in torch.meshgrid(EDGES, EDGES, indexing="ij"))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.maximum.default, (RIGHT,)),
        (aten.minimum.default, (RIGHT,)),
        (aten.clamp.default, (-5, 2**40)),
        (aten.clamp.Tensor, (RIGHT, None)),
        (aten.relu.default, ()),
        (aten.sign.default, ()),
        (aten.amax.default, ([1],)),
        (aten.amin.default, ([0],)),
        (aten.max.default, ()),
        (aten.hardtanh.default, (-1, 2**33)),
    ],
    ids=str,
)
def test_comparisons_see_all_64_bits(target: Any, args: tuple[Any, ...], engine: str) -> None:
    if engine == "openvino" and any(isinstance(arg, int) and abs(arg) > 2**24 for arg in args):
        with pytest.raises(EngineError, match="is correct from"):
            answers(target, LEFT, *args, engine=engine)
        return
    have, want = answers_of_both(target, LEFT, *args, engine=engine)
    assert torch.equal(have, want)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("target", [aten.amax.default, aten.amin.default])
@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 2], []], ids=str)
def test_extremes_of_integers_beyond_32_bits_are_exact_or_pytorchs(
    target: Any, axes: list[int], engine: str
) -> None:
    small = torch.arange(125).reshape(5, 5, 5) - 60
    have, want = answers(target, small, axes, engine=engine)
    assert torch.equal(have, want)
    for far in (2**31, -(2**31) - 7, 2**53 + 1):
        large = small.clone()
        large.view(-1)[7] = far
        with pytest.raises(GuardError):
            answers(target, large, axes, engine=engine)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    "target", [aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor], ids=str
)
def test_the_least_integer_by_minus_one(target: Any, dtype: torch.dtype) -> None:
    """A processor that divides them kills the process."""
    limits = torch.iinfo(dtype)
    sides = torch.tensor([limits.min, limits.min + 1, -7, -1, 0, 1, 7, limits.max], dtype=dtype)
    a, b = (t.contiguous() for t in torch.meshgrid(sides, sides[sides != 0], indexing="ij"))
    have, want = answers(target, a, b)
    assert torch.equal(have, want)
    have, want = answers(target, a, b.new_full((1,), -1))
    assert torch.equal(have, want)


# Operands of any two dtypes, tensors, 0-d tensors and Python numbers: torch's dtype and torch's values.


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

"""Nudged values: what is moved, and what stays to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intarsia.rounding import _moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=20),
    st.floats(-1, 1, width=32),
    st.sampled_from([2.0**-23, 2.0**-10, 0.5]),
)
def test_fractions_move_by_their_share_and_all_else_stays(
    dtype: torch.dtype, numbers: list[float], share: float, step: float
) -> None:
    value = torch.tensor(numbers, dtype=dtype)
    noise = torch.full_like(value, share)
    made = _moved(value, noise, step)
    plain = torch.where(value == value.trunc(), value, torch.addcmul(value, value, noise, value=step))
    torch.testing.assert_close(made, plain, rtol=0, atol=0, equal_nan=True)
    number = ~value.isnan()
    assert torch.equal(torch.signbit(made)[number], torch.signbit(value)[number])  # of zeros, too

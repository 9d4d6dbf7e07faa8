"""What a tensor adds up to is known while it is written through `write` alone; a guard then need not look."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intarsia
from intarsia.engines.guards.inputs import (
    input_check,
    is_known_to_hold,
    known_squares,
    squares_of,
    tell_zeros,
    write,
)
from intarsia.engines.guards.kinds import ValueGuard

WRITES = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), st.floats(-1e3, 1e3)), max_size=8)


@given(WRITES, st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_what_is_known_is_never_less_than_what_there_is(
    writes: list[tuple[int, int, float]], dtype: torch.dtype
) -> None:
    memory = torch.zeros(2, 12, dtype=dtype)
    tell_zeros(memory)
    for start, count, value in writes:
        write(memory, (slice(None), slice(start, start + count)), torch.full((2, count), value))
    known = known_squares(memory)
    assert known is not None and known >= squares_of(memory.numpy()) * (1 - 1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_small_is_not_known_to_be(value: float) -> None:
    memory = torch.zeros(3)
    tell_zeros(memory)
    guard = ValueGuard("x", -1e10, 1e10, total=True)
    assert is_known_to_hold(guard, memory)
    write(memory, (slice(1, 2),), torch.tensor([value]))
    assert not is_known_to_hold(guard, memory)


@pytest.mark.parametrize("inference", [False, True])
def test_a_write_of_somebody_else_is_noticed(inference: bool) -> None:
    memory = torch.zeros(4)
    tell_zeros(memory)
    with torch.inference_mode(inference):
        memory[1:][0] = math.inf  # through a view of a view
    assert known_squares(memory) is None
    write(memory, (slice(0, 1),), torch.ones(1))
    assert known_squares(memory) is None  # what was there is not known


def test_nothing_is_known_of_other_tensors() -> None:
    guard = ValueGuard("x", -1e10, 1e10, total=True)
    with torch.inference_mode():
        unversioned = torch.zeros(2)
        tell_zeros(unversioned)
        write(unversioned, (slice(1),), torch.ones(1))
    short = torch.zeros(2, dtype=torch.bfloat16)
    tell_zeros(short)
    for given_ in (unversioned, short, torch.zeros(2), 3):
        assert not is_known_to_hold(guard, given_)
    memory = torch.zeros(2)
    tell_zeros(memory)
    assert not is_known_to_hold(ValueGuard("x", 0.0, 5.0), memory)  # of elements, not of what they add up to
    assert known_squares(memory.clone()) is None


class Attends(nn.Module):
    def forward(self, query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.softmax(query @ memory.transpose(-1, -2), -1) @ memory


@pytest.mark.openvino
def test_a_guarded_input_is_not_looked_at_while_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    model, query = Attends(), torch.randn(1, 2, 1, 8)
    fast = intarsia.compile(model, (query, torch.randn(1, 2, 600, 8)), engines=["openvino"])

    def seen(array: np.ndarray[Any, Any]) -> float:
        looked.append(array.size)
        return squares_of(array)

    monkeypatch.setattr("intarsia.engines.guards.inputs.squares_of", seen)
    memory = torch.zeros(1, 2, 600, 8)
    fast(query, memory)
    assert memory.numel() in looked
    tell_zeros(memory)
    for token in range(3):
        write(memory, (slice(None), slice(None), slice(token, token + 1)), torch.randn(1, 2, 1, 8))
        looked.clear()
        assert torch.allclose(fast(query, memory), model(query, memory), atol=1e-5)
        assert memory.numel() not in looked
    memory[0, 0, 599, 0] = math.inf
    with pytest.warns(UserWarning, match="memory must be finite"):
        assert torch.equal(fast(query, memory).isnan(), model(query, memory).isnan())


# Guards of inputs: what they let through, at every size and dtype, and that they wake no pool of threads.


_SIZES = st.sampled_from([0, 1, 7, 8191, 8192, 8193, 20_000])


@given(_SIZES, st.sampled_from([np.float16, np.float32, np.float64]), st.integers(0, 19_999))
def test_the_length_of_the_whole_is_what_counts(size: int, dtype: type, place: int) -> None:
    holds = input_check(ValueGuard("x", -1000.0, 1000.0, total=True))
    array = np.zeros(size, dtype)
    assert holds(array)
    if size:
        array[place % size] = 999
        assert holds(array)
        array[(place + 1) % size] += 1001
        assert not holds(array)
        for wild in (np.inf, -np.inf, np.nan):
            array[place % size] = wild
            assert not holds(array)


@given(_SIZES, st.sampled_from([np.float16, np.float32, np.float64, np.int32]), st.integers(0, 19_999))
def test_every_element_must_lie_within(size: int, dtype: type, place: int) -> None:
    holds = input_check(ValueGuard("x", -5.0, 7.0))
    array = np.zeros((1, size), dtype)
    for value, fine in ((7, True), (-5, True), (8, False), (-6, False)):
        if size:
            array[0, place % size] = value
        assert holds(array) is (fine or not size)
    if size and dtype is not np.int32:
        array[0, place % size] = np.nan
        assert not holds(array)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads where Linux lists them")
def test_no_pool_of_threads_is_woken() -> None:
    """Torch's spins for milliseconds after its last work, beside the engine that runs next."""
    code = """
import os, numpy, torch
from intarsia.engines.guards.inputs import input_check
from intarsia.engines.guards.kinds import ValueGuard
torch.set_num_threads(4)
before = len(os.listdir("/proc/self/task"))
for total in (False, True):
    input_check(ValueGuard("x", -9.0, 9e9, total=total))(numpy.ones((3, 400, 400), numpy.float32))
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"

"""Guards of inputs: what they let through, at every size and dtype, and that they wake no pool of threads."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intarsia.engines.guards.inputs import input_check
from intarsia.engines.guards.kinds import ValueGuard

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

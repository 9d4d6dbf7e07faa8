"""What tests that compare a pipeline with the plain module share."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

MODES = ["always", "except_last", "never"]


@pytest.fixture(autouse=True)
def one_thread():
    """The number of threads may change the last bit of a sum; one thread compares exactly."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cuts(count: int, stages: int) -> list[int]:
    return [len(range(j, count, stages)) for j in range(stages)]


def chunked(module, x, chunks):
    return torch.cat([module(piece) for piece in x.chunk(chunks)])


def assert_same(plain: nn.Module, piped: nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for (name, a), b in zip(plain.named_buffers(), piped.buffers(), strict=True):
        assert torch.equal(a, b), name


def threads_end(before: int) -> bool:
    """Whether the threads of pipelines that nothing holds any more end, so that only `before` are left."""
    return ends(lambda: threading.active_count() <= before, limit_s=10)


def ends(is_over: Callable[[], bool], limit_s: float) -> bool:
    """Whether this comes true once the garbage of a test is collected.

    Again and again, since a stage lets go of its last task when it has ended; and for a second the young
    objects alone, which a test's own are: to look through all that a worker holds takes a second each time.
    """
    began = time.monotonic()
    while not is_over() and time.monotonic() < began + limit_s:
        gc.collect(1 if time.monotonic() < began + 1 else 2)
        time.sleep(0.01)
    return is_over()

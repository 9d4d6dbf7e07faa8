"""What tests that compare a pipeline with the plain module share."""

from __future__ import annotations

import gc
import threading
import time

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
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        gc.collect()  # again and again: a stage lets go of its last task when it has ended
        time.sleep(0.01)
    return threading.active_count() <= before

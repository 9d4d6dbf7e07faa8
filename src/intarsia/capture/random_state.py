"""The process's random generators: put back after a block, so that compiling draws nothing."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Inside, numbers may be drawn; outside, nobody sees it: torch's, numpy's and Python's generators."""
    numpy = sys.modules.get("numpy")  # torch works without it, and unimported it has drawn nothing
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [*range(torch.cuda.device_count())] if started else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def keeps_random_state(function: Callable[P, T]) -> Callable[P, T]:
    """The function, under `kept_random_state`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with kept_random_state():
            return function(*args, **kwargs)

    return wrapper

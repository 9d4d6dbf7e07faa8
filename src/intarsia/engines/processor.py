"""The processor: by it engines pick their kernels, and its cores are shared."""

from __future__ import annotations

import functools
import platform

import torch

# The processor that engines pick their kernels by.


@functools.cache
def is_arm() -> bool:
    """Whether it is one of ARM, of 64 bits."""
    return platform.machine().lower() in ("aarch64", "arm64")


# How many threads an engine gets: as many as torch, so that engines that take turns share the cores.


def thread_count(asked: int | None) -> int:
    """The user's number, or torch's."""
    return torch.get_num_threads() if asked is None else asked

"""The processor: by it engines pick their kernels, and its cores are shared."""

from __future__ import annotations

import functools
import platform

import torch


@functools.cache
def is_arm() -> bool:
    """Whether it is one of ARM, of 64 bits."""
    return platform.machine().lower() in ("aarch64", "arm64")


def thread_count(asked: int | None) -> int:
    """The user's number, or torch's, so that engines that take turns share the cores."""
    return torch.get_num_threads() if asked is None else asked

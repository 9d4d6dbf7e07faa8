"""How the caller's cores are shared among stages that run on the CPU at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def shared_cores(devices: list[torch.device]) -> Iterator[Callable[[], None]]:
    """Give each CPU stage its part of torch's threads: what is handed out is to be called in each worker.

    Every thread that calls into torch has a team of OpenMP threads of its own, so n stages would
    otherwise put n times as many threads to work as the caller asked for.
    """
    stages = sum(device.type == "cpu" for device in devices)
    threads = torch.get_num_threads()
    if stages == 0:
        yield lambda: None
        return
    share = max(1, threads // stages)
    try:
        yield lambda: torch.set_num_threads(share)
    finally:
        # OpenMP keeps the number per thread, but torch and MKL also keep one for all; put it back.
        torch.set_num_threads(threads)

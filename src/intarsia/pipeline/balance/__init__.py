"""Balancing: the number of layers of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from intarsia.pipeline.balance.profile import profile_sizes, profile_times
from intarsia.pipeline.balance.solver import Solution, balance_stages, solve

__all__ = ["Solution", "balance_by_size", "balance_by_time", "balance_cost", "balance_stages"]

Device = torch.device | int | str


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """The balance for layers of known cost. It minimizes the cost of the most expensive stage.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    """
    return [len(block) for block in solve(cost, partitions)]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    recompute: bool = True,
    cache: bool = True,
    progress: bool = True,
) -> list[int]:
    """The balance by the measured time of each layer.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> sum(balance_by_time(2, model, torch.rand(8, 4), timeout=0.01, device="cpu", cache=False))
    3

    Args:
        partitions: how many stages.
        module: the module; copies of its layers are measured, one at a time.
        sample: a mini-batch, or better a micro-batch, such as the stages will get.
        timeout: about how many seconds to measure, warm-up aside.
        device: where to measure: the current CUDA device by default, or the CPU where there is none.
        recompute: whether a second forward pass, for checkpointing, belongs to a layer's time.
        cache: whether times measured before, of equal layers on this machine, are used and kept.
        progress: whether a progress bar is shown on a terminal.
    """
    times = profile_times(
        module, sample, timeout, _device(device), recompute=recompute, cache=cache, progress=progress
    )
    return balance_cost(times, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    progress: bool = True,
) -> list[int]:
    """The balance by the memory of each layer in training.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400))
    >>> balance_by_size(2, model, torch.rand(8, 4), device="cpu")
    [1, 1]

    Args:
        partitions: how many stages.
        module: the module; copies of its layers are run, one at a time.
        input: a mini-batch.
        chunks: into how many micro-batches it will be cut.
        param_scale: bytes in training per byte of parameters: 2 to 3 for SGD, 4 to 5 for Adam.
        device: where to run: the current CUDA device, whose allocator is asked, or the CPU.
        progress: whether a progress bar is shown on a terminal.
    """
    return balance_cost(
        profile_sizes(module, input, chunks, param_scale, _device(device), progress=progress), partitions
    )


def _device(device: Device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen

"""Balances: the number of layers in each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from intarsia.pipeline.balance.profile import profile_sizes, profile_times
from intarsia.pipeline.balance.solver import Solution, balance_stages, solve
from intarsia.pipeline.gpipe.stream import indexed

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
        partitions: the number of stages.
        module: the module. Copies of its layers are measured, one at a time.
        sample: an example input. A micro-batch gives better results than a mini-batch.
        timeout: the approximate seconds of measurement, without warm-up.
        device: the device to measure on. By default, the current CUDA device, or the CPU if there is none.
        recompute: whether to add a second forward pass, for checkpointing, to the time of a layer.
        cache: whether to reuse and store the times of equal layers on this machine.
        progress: whether to show a progress bar on a terminal.
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
        partitions: the number of stages.
        module: the module. Copies of its layers run, one at a time.
        input: a mini-batch.
        chunks: the number of micro-batches in the mini-batch.
        param_scale: bytes in training per byte of parameters: 2 to 3 for SGD, 4 to 5 for Adam.
        device: the device to run on. By default, the current CUDA device, or the CPU if there is none.
        progress: whether to show a progress bar on a terminal.
    """
    return balance_cost(
        profile_sizes(module, input, chunks, param_scale, _device(device), progress=progress), partitions
    )


def _device(device: Device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return indexed(torch.device(device))

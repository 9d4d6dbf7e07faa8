"""How long kernels take: a call recorded in a CUDA graph and replayed, so that launching is not timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS, _REPLAYS = 7, 5  # interleaved: times drift by more than rewrites gain


def recorded(call: Callable[[], Any]) -> Callable[[], float]:
    """Times a few replays of a call, in milliseconds; RuntimeError where a CUDA graph cannot hold it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            result = call()
    held = (call, result)

    def time() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        assert held  # what the graph reads and writes
        return float(start.elapsed_time(end))

    time()
    return time


def ratio(one: Callable[[], float], other: Callable[[], float]) -> float:
    """The time of one over that of the other, medians of interleaved rounds."""
    rounds = [(one(), other()) for _ in range(_ROUNDS)]
    return statistics.median(a for a, _ in rounds) / statistics.median(b for _, b in rounds)

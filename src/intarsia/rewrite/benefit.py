"""What a shipped pattern is worth on this machine: measured once per engine, remembered on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from intarsia.cache.machine import machine_key
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.network import Network
from intarsia.rewrite.check import Build, random_inputs
from intarsia.rewrite.fusions import Fusion, NetworkBuilder
from intarsia.rewrite.manager import RewritePatternManager

PAYS = 0.97  # time with over time without, below which a pattern is applied


def cache_file() -> Path:
    """Where measurements are kept: `rewrite.json` in the cache directory."""
    return cache_directory() / "rewrite.json"


def engine_key(engine: NetworkBuilder, device: str = "cpu") -> str:
    """An engine on a machine: another version, processor, GPU or number of threads is measured anew."""
    where = machine_key() if device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{engine.family}, {engine.version()}, {where}"


class Benefits:
    """Time with a pattern over time without, by engine and pattern, on one kind of device.

    >>> import tempfile, pathlib
    >>> from intarsia.engines import OnnxRuntime
    >>> benefits = Benefits(pathlib.Path(tempfile.mkdtemp()) / "rewrite.json")
    >>> benefits.remember(OnnxRuntime(), "attention", 0.8)
    >>> benefits.get(OnnxRuntime(), "attention")
    0.8
    """

    def __init__(self, path: Path | None = None, device: str = "cpu") -> None:
        self.store: JsonStore = JsonStore(cache_file() if path is None else path)
        self.device = device

    def get(self, engine: NetworkBuilder, name: str) -> float | None:
        """What was measured, if it was."""
        of_engine = self.store.read().get(engine_key(engine, self.device))
        ratio = of_engine.get(name) if isinstance(of_engine, dict) else None
        return ratio if isinstance(ratio, float) and ratio > 0 else None

    def remember(self, engine: NetworkBuilder, name: str, ratio: float) -> None:
        """Keep a measurement, beside what other programs keep."""
        self.store.update({engine_key(engine, self.device): {name: round(float(ratio), 4)}})

    def measured(self, engine: NetworkBuilder, fusion: Fusion) -> float:
        """What was measured, or else is measured now."""
        ratio = self.get(engine, fusion.name)
        if ratio is None:
            ratio = measure(fusion, engine.build, device=self.device)
            self.remember(engine, fusion.name, ratio)
        return ratio


def measure(
    fusion: Fusion, build: Build, *, seconds: float = 0.3, seed: int = 0, device: str = "cpu"
) -> float:
    """Run a fusion's large network with and without it, in turns; the ratio of the best times."""
    without = fusion.sample(np.random.default_rng(seed), large=True)
    with_it = fusion.sample(np.random.default_rng(seed), large=True)
    manager = RewritePatternManager()
    manager.add(fusion.name, fusion.pattern)
    manager.rewrite(with_it)
    inputs = [value.to(device) for value in random_inputs(without, np.random.default_rng(seed))]
    timer = _timer if device == "cpu" else _gpu_timer
    return _best_ratio(timer(build, with_it, inputs), timer(build, without, inputs), seconds)


def _gpu_timer(build: Build, net: Network, inputs: list[torch.Tensor]) -> Callable[[], float]:
    """Times on the GPU's own clock, of several calls in a row: launching is hidden where it can be."""
    program = build(net)
    program(*inputs)
    calls = 10

    def timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            program(*inputs)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls

    return timed


def _timer(build: Build, net: Network, inputs: list[torch.Tensor]) -> Callable[[], float]:
    program = build(net)
    program(*inputs)  # the first call prepares

    def timed() -> float:
        start = time.perf_counter()
        program(*inputs)
        return time.perf_counter() - start

    return timed


def _best_ratio(one: Callable[[], float], other: Callable[[], float], seconds: float) -> float:
    best = [float("inf"), float("inf")]
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        best = [min(best[0], one()), min(best[1], other())]
        rounds += 1
    return best[0] / best[1]

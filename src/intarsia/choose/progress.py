"""What a search has left of time and memory, and what it measures, told on a terminal."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import fx

from intarsia.logs import tell


class Progress:
    """The time that a search has spent, and what its line on a terminal says."""

    def __init__(self, budget_s: float = math.inf) -> None:
        self._began = time.perf_counter()
        self.budget_s = budget_s
        self._best = ""

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self._began

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s

    @property
    def deadline(self) -> float:
        """When the budget is spent, by `time.perf_counter`."""
        return self._began + self.budget_s

    def tell(self, what: str) -> None:
        """Say what happens now."""
        best = f"; best so far {self._best}" if self._best else ""
        tell(f"{what}{best} (Ctrl-C takes the best)", None if math.isinf(self.budget_s) else self.left_s)

    def best(self, name: str, seconds: float) -> None:
        """Say which plan leads."""
        self._best = f"{name}, {seconds * 1e3:.2f} ms"


_COPIES = 2.0  # a packed copy, and what building takes besides
_CGROUP = Path("/sys/fs/cgroup")


def no_room(module: fx.GraphModule) -> str | None:
    """Why another plan of this graph may not fit into memory, in a clause; None where it does."""
    weights = {id(t): t for t in _constants(module)}
    needs = _COPIES * sum(t.numel() * t.element_size() for t in weights.values())
    free = free_bytes()
    if free is None or needs <= free:
        return None
    return f"it may take {needs / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"


def free_bytes() -> int | None:
    """Memory that this process may still take, as Linux tells it; None elsewhere."""
    limits = [value for value in (_available(), _left_to_group()) if value is not None]
    return min(limits, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None


def _left_to_group() -> int | None:
    """What the limit of a container leaves."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        return limit - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no limit ("max"), no such file
        return None


def _constants(module: fx.GraphModule) -> list[torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [tensor for _, tensor in named if tensor.device.type == "cpu"]

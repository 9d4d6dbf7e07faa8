"""What a search has left of time and memory, and what it measures, told on a terminal."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.status import Status
from torch import fx


class Progress:
    """One line on stderr that changes: what is measured, the best so far, the time left."""

    def __init__(self, budget_s: float = math.inf, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._status: Status | None = console.status("measuring") if console.is_terminal else None
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
        if self._status is not None:
            best = f"; best so far {self._best}" if self._best else ""
            left = "" if math.isinf(self.budget_s) else f"; {max(self.left_s, 0):.0f} s left"
            self._status.update(f"{what}{best}{left} (Ctrl-C takes the best)")

    def best(self, name: str, seconds: float) -> None:
        """Say which plan leads."""
        self._best = f"{name}, {seconds * 1e3:.2f} ms"

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()


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

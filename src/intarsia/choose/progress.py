"""What is being measured, told on a terminal; elsewhere nothing is written."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status


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

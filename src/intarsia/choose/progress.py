"""What a search measures and how long it may still take, said on a terminal."""

from __future__ import annotations

import math
import time

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

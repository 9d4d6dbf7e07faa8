"""What a user asks for: `compile(model, args, partition=Measured(budget_s=20))`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from intarsia.engines import Engine
from intarsia.errors import PartitionError

Objective = Literal["latency", "throughput"]


def is_number(value: object) -> bool:
    """Whether a user gave a number: True is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Measured:
    """Choose the plan by timing it on this machine.

    Args:
        objective: `"latency"` minimizes the time of one call. `"throughput"` maximizes calls per second from
            several threads, at the largest sizes.
        budget_s: seconds for building and measuring. What does not fit is left out, and the plan says so. The
            first plan is built whatever the budget. None limits the search to 1.7 times the first build, and
            engines that are slow to build are not tried.
        candidates: engines with options of your own, measured beside `engines`. None for the options that are
            known to matter, an empty sequence for none.

    >>> Measured(budget_s=5).objective
    'latency'
    """

    objective: Objective = "latency"
    budget_s: float | None = None
    candidates: Sequence[Engine] | None = None

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise PartitionError(
                f"objective={self.objective!r} is not known; known are {', '.join(get_args(Objective))}"
            )
        if self.budget_s is not None and (not is_number(self.budget_s) or not self.budget_s > 0):
            raise PartitionError(f"budget_s={self.budget_s!r} must be more than 0 seconds")
        if self.candidates is None:
            return
        if isinstance(self.candidates, Engine):
            raise PartitionError(f"candidates={self.candidates!r} is one engine; give a list of them")
        if isinstance(self.candidates, str) or not isinstance(self.candidates, Sequence):
            raise PartitionError(
                f"candidates={self.candidates!r}; give a list of engines, such as [OpenVINO()]"
            )
        for engine in self.candidates:
            if not isinstance(engine, Engine):
                raise PartitionError(
                    f"candidates holds {engine!r}, which is not an engine, such as OpenVINO()"
                )

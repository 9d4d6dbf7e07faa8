"""What is measured: `compile(model, args, partition=Measured(budget_s=20))`, or by default."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import fx

from intarsia.engines import Engine
from intarsia.errors import InputError, PartitionError
from intarsia.partition.blocks import work

Objective = Literal["latency", "throughput"]


def is_number(value: object) -> bool:
    """Whether an option's value is a number, which a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Measured:
    """Choose the plan by timing it on this machine.

    Args:
        objective: `"latency"` minimizes the time of one call. `"throughput"` maximizes calls per second from
            several threads, at the largest sizes.
        budget_s: seconds for building and measuring. Candidates that do not fit are left out, and the plan
            lists them. The first plan is always built. None limits the search to 1.7 times the first build
            and leaves out engines that are slow to build.
        candidates: engines with options of your own, measured in addition to `engines`. None measures the
            options that usually matter; an empty sequence measures none.

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


LEAST_WORK = 100.0  # units of about one small eager operator, or a megaflop: about a millisecond
SETTING = "INTARSIA_MEASURE"


def is_measuring() -> bool:
    """Whether `compile` measures if neither engines nor a partition are named; not if the variable is 0.

    >>> is_measuring() == (os.environ.get(SETTING, "1") == "1")
    True
    """
    setting = os.environ.get(SETTING, "1")
    if setting not in ("0", "1"):
        raise InputError(f"{SETTING}={setting!r} in the environment; give 0 or 1")
    return setting == "1"


def too_small_to_measure(module: fx.GraphModule) -> str | None:
    """Why a graph is too small to measure, in a sentence; None if it is not."""
    total = sum(work(node) for node in module.graph.nodes if node.op == "call_function")
    if total >= LEAST_WORK:
        return None
    return (
        f"plans were not measured: the model has {total:.0f} units of work; plans are measured from"
        f" {LEAST_WORK:g}; partition=Measured() measures it"
    )


Precision = Literal["fp32", "bf16", "fp16", "int8", "int8-weights", "int4-weights"]
SHORTENING_S = 30.0  # the budget with a tolerance, if the user sets none: there are more plans to build


def allowed_arithmetic(
    precision: Precision | None, tolerance: float | None, *, verify: bool
) -> tuple[str, ...]:
    """The kinds of arithmetic besides the model's own that may be tried; none without a tolerance.

    With `precision="fp32"`, a tolerance only bounds the error of engines with the model's own arithmetic.

    >>> allowed_arithmetic(None, 0.02, verify=True)
    ('bf16', 'fp16', 'int8', 'int8-weights', 'int4-weights')
    >>> allowed_arithmetic("bf16", 0.02, verify=True)
    ('bf16',)
    """
    known = get_args(Precision)
    if precision is not None and precision not in known:
        raise InputError(f"precision={precision!r} is not known; known are {', '.join(known)}")
    if tolerance is None:
        if precision in (None, "fp32"):
            return ()
        raise InputError(f"precision={precision!r} needs tolerance=, the largest error of results")
    if not is_number(tolerance) or not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance!r} must be a share of the largest value, between 0 and 1")
    if not verify:
        raise InputError(
            f"tolerance={tolerance!r} needs verify=True: the error is found by running the model"
        )
    if precision == "fp32":
        return ()
    return (precision,) if precision is not None else known[1:]


def refuse_short_engines(engines: Sequence[Engine]) -> None:
    """InputError for engines of shorter arithmetic that would be measured without a tolerance."""
    for engine in engines:
        if not engine.is_exact:
            raise InputError(
                f"{engine.name} computes in {engine.arithmetic}, and is only measured within a tolerance:"
                f" give"
                " tolerance=, or omit partition=Measured()"
            )

"""What a user asked of `compile`, as its steps hand it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from intarsia.capture.call import Call
from intarsia.choose.measured import Measured, is_number
from intarsia.choose.precision import SHORTENING_S, allowed_arithmetic
from intarsia.errors import InputError
from intarsia.partition import PartitionOptions, Strategy, find_strategy
from intarsia.partition.options import PartitionChoices, partition_options
from intarsia.rewrite import Patterns
from intarsia.rewrite.apply import as_list


@dataclass(frozen=True)
class Wishes:
    """What a user asked for besides the model, its inputs and the engines."""

    strategy: Strategy
    measured: Measured | None
    options: PartitionOptions
    rewrite: Patterns
    verify: bool
    cuda_graphs: bool | Literal["static"] | None
    build_limit_s: float | None
    graphs: list[fx.GraphModule] | None = None  # where names are checked later, the graphs they may mean
    only_if_worth_it: bool = False  # measured by default, not by a user's word
    began: float = 0.0  # when the compile began, by `time.perf_counter`
    tolerance: float | None = None  # how far results may be off; None for the model's own arithmetic
    more: Sequence[Call] = ()  # further calls to be tried on

    def __post_init__(self) -> None:
        limit = self.build_limit_s
        if limit is not None and (not is_number(limit) or not limit > 0):
            raise InputError(f"build_limit_s={limit!r}; give seconds, or None for no limit")
        if not (self.rewrite is None or isinstance(self.rewrite, bool)):
            as_list(self.rewrite)
        if not isinstance(self.verify, bool):
            raise InputError(f"verify={self.verify!r}; give True or False")
        if self.cuda_graphs not in (None, True, False, "static"):
            raise InputError(f"cuda_graphs={self.cuda_graphs!r}; give True, False, 'static' or None")


def wishes_of(
    *,
    partition: Any = None,
    precision: Any = None,
    tolerance: float | None = None,
    options: PartitionOptions | None = None,
    choices: PartitionChoices | None = None,
    rewrite: Patterns = None,
    verify: bool = True,
    cuda_graphs: Any = None,
    build_limit_s: float | None = None,
    fallback: str = "parts",
    began: float = 0.0,
) -> tuple[Wishes, tuple[str, ...]]:
    """The arguments of `compile`, each checked, and the shorter arithmetic that they allow.

    >>> wishes_of(fallback="part")
    Traceback (most recent call last):
    ...
    intarsia.errors.InputError: fallback='part'; give 'parts', 'eager' or 'error'
    """
    if fallback not in ("parts", "eager", "error"):
        raise InputError(f"fallback={fallback!r}; give 'parts', 'eager' or 'error'")
    arithmetic = allowed_arithmetic(precision, tolerance, verify=verify)
    if arithmetic and partition is not None and not isinstance(partition, Measured):
        raise InputError(f"tolerance={tolerance!r} needs partition=Measured(), not {partition!r}")
    if arithmetic and partition is None:
        partition = Measured(budget_s=SHORTENING_S)
    measured = partition if isinstance(partition, Measured) else None
    wishes = Wishes(
        find_strategy("dependency" if partition is None or measured is not None else partition),
        measured,
        partition_options(options, choices or {}),
        rewrite,
        verify,
        cuda_graphs,
        build_limit_s,
        began=began,
        tolerance=tolerance,
    )
    return wishes, arithmetic

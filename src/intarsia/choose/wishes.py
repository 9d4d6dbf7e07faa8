"""What a user asked of `compile`, as its steps hand it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from intarsia.capture.call import Call
from intarsia.choose.measured import Measured
from intarsia.errors import InputError
from intarsia.partition import PartitionOptions, Strategy
from intarsia.rewrite import Patterns


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
        if limit is not None and (type(limit) not in (int, float) or not limit > 0):
            raise InputError(f"build_limit_s={limit!r}; give seconds, or None for no limit")
        if not isinstance(self.verify, bool):
            raise InputError(f"verify={self.verify!r}; give True or False")
        if self.cuda_graphs not in (None, True, False, "static"):
            raise InputError(f"cuda_graphs={self.cuda_graphs!r}; give True, False, 'static' or None")

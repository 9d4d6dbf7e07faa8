"""Pipeline schedules: for each rank, the order in which it runs its stages on its micro-batches.

A schedule is a generator of slots for one rank. With 3 ranks and 4 micro-batches, time running right
(`F` forward, `B` backward, `I` and `W` the gradients of inputs and of weights):

    GPipe        F0 F1 F2 F3 -  -  -  -  B0 B1 B2 B3     all forward, then all backward
    1F1B         F0 F1 F2 B0 F3 B1 B2 B3                 each backward as soon as it can run: less memory
    interleaved  F0 F1 F2 f0 f1 f2 ...                   each rank holds several stages: smaller bubbles
    zero bubble  F0 F1 F2 I0 F3 I1 W0 I2 W1 ...          weight gradients fill the bubbles

`define_schedule` gives a generator a name. It is then run, simulated, planned, drawn and listed like these:

    @define_schedule("LastInFirstOut")
    def last_in_first_out(rank, ranks, microbatches, per_rank):
        for i in range(microbatches):
            yield Slot(rank, FORWARD, i)
        for i in reversed(range(microbatches)):
            yield Slot(rank, BACKWARD, i)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from intarsia.errors import PartitionError

Whole = NDArray[np.int64]


class Action(IntEnum):
    """What a stage does with a micro-batch; printed as one letter."""

    FORWARD = 0
    BACKWARD = 1  # the gradients of inputs and weights
    INPUT = 2  # the gradient of the inputs alone
    WEIGHT = 3  # the gradient of the weights, after INPUT

    def __str__(self) -> str:
        return "FBIW"[self]


FORWARD, BACKWARD, INPUT, WEIGHT = Action


class Slot(NamedTuple):
    """One entry of a rank's schedule: a stage runs an action on a micro-batch.

    >>> print(Slot(2, Action.FORWARD, 5))
    2F5
    """

    stage: int
    action: Action
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.action}{self.microbatch}"


Order = Callable[[int, int, int, int], Iterator[Slot]]
"""(rank, ranks, micro-batches, stages per rank) -> the slots of the rank."""
OrderOf = TypeVar("OrderOf", bound=Order)


@dataclass(frozen=True)
class Definition:
    """A schedule by name: the order of its slots, and what it needs.

    Stage `s` runs on rank `s % ranks`. If the schedule is folded, rank r of n holds stages r and 2n - 1 - r.
    """

    name: str
    order: Order | None  # None: torch can run the schedule, but it cannot be simulated
    per_rank: int = 1  # stages of a rank, unless a call says otherwise
    interleaved: bool = False  # whether a rank may hold several stages
    folded: bool = False
    splits_backward: bool = False  # whether INPUT and WEIGHT take the place of BACKWARD
    divides: bool = False  # whether the number of micro-batches must be a multiple of the ranks
    # The class of torch.distributed.pipelining that runs in this order. Without one, torch's runtime gets the
    # order. A class is preferred: torch's classes are public, and its runtime is not.
    torch: str = ""
    limit: Callable[[int, int], str | None] | None = None  # (ranks, micro-batches) -> why it cannot run

    def refusal(self, ranks: int, microbatches: int) -> str | None:
        """Why the schedule cannot run with these numbers, or None."""
        return None if self.limit is None else self.limit(ranks, microbatches)


def rank_of(stage: int, ranks: int, folded: bool) -> int:
    """The rank that holds a stage."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if folded and turn % 2 else place


SCHEDULES: dict[str, Definition] = {}


def define_schedule(name: str, **needs: Any) -> Callable[[OrderOf], OrderOf]:
    """Register a generator under a name; `needs` are the fields of `Definition`."""

    def register(order: OrderOf) -> OrderOf:
        existing = SCHEDULES.get(name)
        if existing is not None and existing.order is not order:
            raise PartitionError(f"schedule={name!r} is defined already, by {existing.order}")
        SCHEDULES[name] = Definition(name, order, **needs)
        return order

    return register


def find_schedule(name: str) -> Definition | None:
    """The definition with this name, or None; torch may still have a schedule of the name."""
    return SCHEDULES.get(name) or TORCH_ONLY.get(name)


def needs_its_stages(name: str, per_rank: int = 1) -> Callable[[int, int], str | None]:
    """A limit for torch's classes that start with one micro-batch per stage."""

    def limit(ranks: int, microbatches: int) -> str | None:
        stages = per_rank * ranks
        if microbatches >= stages:
            return None
        return (
            f"{name} needs a micro-batch per stage: microbatches={microbatches} is less than {stages} stages"
        )

    return limit


def needs_equal_rounds(name: str) -> Callable[[int, int], str | None]:
    """A limit for torch's classes that run in equal rounds of about one micro-batch per rank."""

    def limit(ranks: int, microbatches: int) -> str | None:
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds == 0:
            return None
        return (
            f"{name} runs in {rounds} rounds of equal length: they do not divide microbatches={microbatches}"
        )

    return limit


@define_schedule("GPipe", torch="ScheduleGPipe")
def gpipe(rank: int, ranks: int, microbatches: int, per_rank: int = 1) -> Iterator[Slot]:
    """All forward passes, then all backward passes.

    >>> print(*gpipe(1, 2, 2))
    1F0 1F1 1B0 1B1
    """
    for i in range(microbatches):
        yield Slot(rank, FORWARD, i)
    for i in range(microbatches):
        yield Slot(rank, BACKWARD, i)


@define_schedule("1F1B", torch="Schedule1F1B", limit=needs_its_stages("1F1B"))
def one_f_one_b(rank: int, ranks: int, microbatches: int, per_rank: int = 1) -> Iterator[Slot]:
    """One forward, one backward: a rank holds at most one micro-batch more than there are ranks after it.

    >>> print(*one_f_one_b(0, 2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    ahead = min(ranks - rank - 1, microbatches)
    for i in range(ahead):
        yield Slot(rank, FORWARD, i)
    for i in range(microbatches - ahead):
        yield Slot(rank, FORWARD, ahead + i)
        yield Slot(rank, BACKWARD, i)
    for i in range(microbatches - ahead, microbatches):
        yield Slot(rank, BACKWARD, i)


@define_schedule(
    "Interleaved1F1B",
    per_rank=2,
    interleaved=True,
    divides=True,
    torch="ScheduleInterleaved1F1B",
    limit=needs_equal_rounds("Interleaved1F1B"),
)
def interleaved(rank: int, ranks: int, microbatches: int, per_rank: int = 2) -> Iterator[Slot]:
    """1F1B with several stages per rank: stage `s` runs on rank `s % ranks`.

    >>> print(*interleaved(1, 2, 2))
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    total = microbatches * per_rank

    def slot(action: Action, i: int) -> Slot:
        # Micro-batches run in groups of `ranks`: each group passes through every stage of the rank.
        group, inside = divmod(i, ranks * per_rank)
        turn, offset = divmod(inside, ranks)
        stage = turn if action is FORWARD else per_rank - 1 - turn
        return Slot(stage * ranks + rank, action, group * ranks + offset)

    ahead = min(total, (per_rank - 1) * ranks + 2 * (ranks - rank - 1))
    for i in range(ahead):
        yield slot(FORWARD, i)
    for i in range(total - ahead):
        yield slot(FORWARD, ahead + i)
        yield slot(BACKWARD, i)
    for i in range(total - ahead, total):
        yield slot(BACKWARD, i)


@define_schedule(
    "ZeroBubble",
    splits_backward=True,
    torch="ScheduleInterleavedZeroBubble",
    limit=needs_equal_rounds("ZeroBubble"),
)
def zero_bubble(rank: int, ranks: int, microbatches: int, per_rank: int = 1) -> Iterator[Slot]:
    """1F1B whose weight gradients run later, on rank r after r micro-batches, and fill the bubble at the end.

    >>> print(*zero_bubble(1, 2, 2))
    1F0 1I0 1F1 1I1 1W0 1W1
    """
    done = 0
    for slot in one_f_one_b(rank, ranks, microbatches, 1):
        if slot.action is FORWARD:
            yield slot
            continue
        yield Slot(rank, INPUT, slot.microbatch)
        if slot.microbatch >= rank:
            yield Slot(rank, WEIGHT, done)
            done += 1
    for i in range(done, microbatches):
        yield Slot(rank, WEIGHT, i)


TORCH_ONLY = {
    definition.name: definition
    for definition in (
        Definition("LoopedBFS", None, per_rank=2, interleaved=True, torch="ScheduleLoopedBFS"),
        Definition("ZBV", None, per_rank=2, folded=True, splits_backward=True, torch="ScheduleZBVZeroBubble"),
        Definition(
            "DualPipeV",
            None,
            per_rank=2,
            folded=True,
            splits_backward=True,
            torch="ScheduleDualPipeV",
            limit=needs_its_stages("DualPipeV", 2),
        ),
    )
}
"""Schedules that torch can run, and that have no generator here."""


@dataclass(frozen=True)
class Schedule:
    """The slots of every rank, in order."""

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Slot, ...], ...]

    @cached_property
    def table(self) -> SlotTable:
        """The slots as arrays."""
        return SlotTable.of(self.ranks, self.stages)

    def __str__(self) -> str:
        return "\n".join(f"rank {i}: {' '.join(map(str, steps))}" for i, steps in enumerate(self.ranks))


@dataclass(frozen=True)
class SlotTable:
    """The slots of all ranks one after the other, as arrays, for the simulation."""

    begins: Whole  # the first index of each rank's slots, and the number of all slots
    stages: Whole
    actions: Whole
    microbatches: Whole
    count: int  # of stages

    @staticmethod
    def of(ranks: Any, count: int) -> SlotTable:
        """The table of the slots in `ranks`."""
        # numpy reads a flat iterator twice as fast as tuples.
        rows = [np.fromiter(chain.from_iterable(slots), np.int64).reshape(-1, 3) for slots in ranks]
        begins = np.cumsum([0, *map(len, rows)])
        stages, actions, microbatches = np.concatenate(rows).T
        return SlotTable(begins, stages.copy(), actions.copy(), microbatches.copy(), count)

    def check(self, definition: Definition, microbatches: int) -> None:
        """Raise PartitionError if a pass is missing, runs twice, too early, or on another rank."""
        name, ranks = definition.name, len(self.begins) - 1
        turns, homes = np.divmod(self.stages, ranks)
        homes = np.where(definition.folded & (turns % 2 == 1), ranks - 1 - homes, homes)
        here = np.repeat(np.arange(ranks), np.diff(self.begins))
        known = (self.stages >= 0) & (self.stages < self.count)
        known &= (self.microbatches >= 0) & (self.microbatches < microbatches)
        strange = ~known | (homes != here)
        if strange.any():
            i = int(strange.argmax())
            slot = Slot(int(self.stages[i]), Action(int(self.actions[i])), int(self.microbatches[i]))
            why = f"there are {self.count} stages and {microbatches} micro-batches"
            why = f"stage {slot.stage} is on rank {homes[i]}" if known[i] else why
            raise PartitionError(f"{name} runs {slot} on rank {here[i]}; {why}")
        keys, places = self.stages * microbatches + self.microbatches, np.arange(len(self.stages))
        when = np.full((3, self.count * microbatches), -1)
        for row, actions in enumerate(((FORWARD,), (BACKWARD, INPUT), (WEIGHT, BACKWARD))):
            chosen = np.isin(self.actions, actions)
            count = np.bincount(keys[chosen], minlength=when.shape[1])
            if len(count) != when.shape[1] or (count != 1).any():
                stage, microbatch = divmod(int(np.argmax(count != 1)), microbatches)
                kind = ("forward pass", "backward pass", "gradient of the weights")[row]
                times = count[stage * microbatches + microbatch]
                raise PartitionError(
                    f"{name} runs the {kind} of stage {stage} on micro-batch {microbatch} {times} times"
                )
            when[row, keys[chosen]] = places[chosen]
        late = (when[0] >= when[1]) | (when[1] > when[2])
        if late.any():
            stage, microbatch = divmod(int(late.argmax()), microbatches)
            raise PartitionError(
                f"{name} runs stage {stage} on micro-batch {microbatch} before a pass that it depends on"
            )

    @cached_property
    def held(self) -> tuple[Whole, Whole]:
        """For each stage, the most micro-batches held at once, and the most held during a backward pass.

        A micro-batch is held from its forward pass to the end of its last gradient.
        """
        order = np.argsort(self.stages, kind="stable")
        stages, actions = self.stages[order], self.actions[order]
        taken = (actions == FORWARD).astype(np.int64)
        freed = ((actions == BACKWARD) | (actions == WEIGHT)).astype(np.int64)
        held = np.cumsum(taken - freed) + freed  # the sums of a stage end at 0
        begins = np.searchsorted(stages, np.arange(self.count))
        back = np.where((actions == BACKWARD) | (actions == INPUT), held, 0)
        return np.maximum.reduceat(held, begins), np.maximum.reduceat(back, begins)


def schedule(name: str, ranks: int, microbatches: int, per_rank: int | None = None) -> Schedule:
    """The schedule with this name, for these numbers of ranks, micro-batches and stages per rank.

    >>> print(schedule("1F1B", 2, 2))
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """
    definition, each = _checked(name, ranks, microbatches, per_rank)
    steps = tuple(map(tuple, _orders(definition, ranks, microbatches, each)))
    plan = Schedule(name, ranks * each, microbatches, steps)
    plan.table.check(definition, microbatches)
    return plan


def _orders(definition: Definition, ranks: int, microbatches: int, per_rank: int) -> Iterator[Iterator[Slot]]:
    """The slots of each rank. An order without an end is cut off where a pass must have been repeated."""
    assert definition.order is not None
    for rank in range(ranks):
        yield islice(definition.order(rank, ranks, microbatches, per_rank), 3 * per_rank * microbatches + 1)


def slot_table(name: str, ranks: int, microbatches: int, per_rank: int | None = None) -> SlotTable:
    """The slots of a schedule as arrays, without an object for each slot. The last few tables are cached."""
    definition, each = _checked(name, ranks, microbatches, per_rank)
    return _slot_table(definition, ranks, microbatches, each)


@lru_cache(maxsize=8)  # a table for 1,000 ranks and 1,000 micro-batches takes 40 MB
def _slot_table(definition: Definition, ranks: int, microbatches: int, per_rank: int) -> SlotTable:
    table = SlotTable.of(_orders(definition, ranks, microbatches, per_rank), ranks * per_rank)
    table.check(definition, microbatches)
    return table


def _checked(name: str, ranks: int, microbatches: int, per_rank: int | None) -> tuple[Definition, int]:
    definition = SCHEDULES.get(name)
    if definition is None:
        if name in TORCH_ONLY:
            raise PartitionError(f"schedule={name!r} cannot be simulated; torch can run it")
        raise PartitionError(f"schedule={name!r} is none of {', '.join(SCHEDULES)}")
    if ranks < 1 or microbatches < 1:
        raise PartitionError(f"ranks={ranks} and microbatches={microbatches} must be 1 or more")
    each = definition.per_rank if per_rank is None else per_rank
    if definition.divides and microbatches % ranks:
        raise PartitionError(f"microbatches={microbatches} must divide by ranks={ranks} in {name}")
    if each != 1 and not definition.interleaved and each != definition.per_rank:
        raise PartitionError(f"per_rank={each}: the stages per rank of {name} are {definition.per_rank}")
    if each < 1:
        raise PartitionError(f"per_rank={each} must be 1 or more")
    return definition, each

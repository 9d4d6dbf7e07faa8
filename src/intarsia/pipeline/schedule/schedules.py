"""Pipeline schedules: for each rank, the order in which it runs its stages on its micro-batches.

A schedule is a generator of slots for one rank. With 3 ranks and 4 micro-batches, time running right
(`F` forward, `B` backward, `I` and `W` the gradients of inputs and of weights):

    GPipe        F0 F1 F2 F3 -  -  -  -  B0 B1 B2 B3     all forward, then all backward
    1F1B         F0 F1 F2 B0 F3 B1 B2 B3                 a backward as soon as one can run: less memory
    interleaved  F0 F1 F2 f0 f1 f2 ...                   each rank holds several stages: smaller bubbles
    zero bubble  F0 F1 F2 I0 F3 I1 W0 I2 W1 ...          weight gradients fill the bubbles
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from intarsia.errors import PartitionError


class Action(StrEnum):
    """What a stage does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of inputs and weights
    INPUT = "I"  # the gradient of the inputs alone
    WEIGHT = "W"  # the gradient of the weights, behind INPUT


@dataclass(frozen=True)
class Slot:
    """One entry of a rank's schedule: a stage runs an action on a micro-batch.

    >>> print(Slot(2, Action.FORWARD, 5))
    2F5
    """

    stage: int
    action: Action
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.action}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The slots of every rank, in order."""

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Slot, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"rank {i}: {' '.join(map(str, steps))}" for i, steps in enumerate(self.ranks))


def gpipe(rank: int, ranks: int, microbatches: int, per_rank: int = 1) -> Iterator[Slot]:
    """All forward passes, then all backward passes.

    >>> print(*gpipe(1, 2, 2))
    1F0 1F1 1B0 1B1
    """
    for i in range(microbatches):
        yield Slot(rank, Action.FORWARD, i)
    for i in range(microbatches):
        yield Slot(rank, Action.BACKWARD, i)


def one_f_one_b(rank: int, ranks: int, microbatches: int, per_rank: int = 1) -> Iterator[Slot]:
    """One forward, one backward: no rank holds more micro-batches than there are stages behind it.

    >>> print(*one_f_one_b(0, 2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    ahead = min(ranks - rank - 1, microbatches)
    for i in range(ahead):
        yield Slot(rank, Action.FORWARD, i)
    for i in range(microbatches - ahead):
        yield Slot(rank, Action.FORWARD, ahead + i)
        yield Slot(rank, Action.BACKWARD, i)
    for i in range(microbatches - ahead, microbatches):
        yield Slot(rank, Action.BACKWARD, i)


def interleaved(rank: int, ranks: int, microbatches: int, per_rank: int = 2) -> Iterator[Slot]:
    """1F1B with several stages a rank: stage `s` runs on rank `s % ranks`.

    >>> print(*interleaved(1, 2, 2))
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    total = microbatches * per_rank

    def slot(action: Action, i: int) -> Slot:
        # Micro-batches go round in groups of `ranks`: each group through every stage of the rank.
        group, inside = divmod(i, ranks * per_rank)
        turn, offset = divmod(inside, ranks)
        stage = turn if action is Action.FORWARD else per_rank - 1 - turn
        return Slot(stage * ranks + rank, action, group * ranks + offset)

    ahead = min(total, (per_rank - 1) * ranks + 2 * (ranks - rank - 1))
    for i in range(ahead):
        yield slot(Action.FORWARD, i)
    for i in range(total - ahead):
        yield slot(Action.FORWARD, ahead + i)
        yield slot(Action.BACKWARD, i)
    for i in range(total - ahead, total):
        yield slot(Action.BACKWARD, i)


def zero_bubble(rank: int, ranks: int, microbatches: int, per_rank: int = 1) -> Iterator[Slot]:
    """1F1B whose weight gradients wait, on rank r for r micro-batches, and fill the bubble at the end.

    >>> print(*zero_bubble(1, 2, 2))
    1F0 1I0 1F1 1I1 1W0 1W1
    """
    done = 0
    for slot in one_f_one_b(rank, ranks, microbatches):
        if slot.action is Action.FORWARD:
            yield slot
            continue
        yield Slot(rank, Action.INPUT, slot.microbatch)
        if slot.microbatch >= rank:
            yield Slot(rank, Action.WEIGHT, done)
            done += 1
    for i in range(done, microbatches):
        yield Slot(rank, Action.WEIGHT, i)


Generator = Callable[[int, int, int, int], Iterator[Slot]]

SCHEDULES: dict[str, Generator] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "Interleaved1F1B": interleaved,
    "ZeroBubble": zero_bubble,
}


def schedule(name: str, ranks: int, microbatches: int, per_rank: int | None = None) -> Schedule:
    """The schedule of a name, for so many ranks, micro-batches and stages per rank.

    >>> print(schedule("1F1B", 2, 2))
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """
    if name not in SCHEDULES:
        raise PartitionError(f"schedule={name!r} is none of {', '.join(SCHEDULES)}")
    if ranks < 1 or microbatches < 1:
        raise PartitionError(f"ranks={ranks} and microbatches={microbatches} must be 1 or more")
    each = per_rank if per_rank is not None else 2 if name == "Interleaved1F1B" else 1
    if name == "Interleaved1F1B":
        if microbatches % ranks:
            raise PartitionError(f"microbatches={microbatches} must divide by ranks={ranks} when interleaved")
    elif each != 1:
        raise PartitionError(f"per_rank={each}: only Interleaved1F1B gives a rank more than one stage")
    if each < 1:
        raise PartitionError(f"per_rank={each} must be 1 or more")
    steps = tuple(tuple(SCHEDULES[name](r, ranks, microbatches, each)) for r in range(ranks))
    return Schedule(name, ranks * each, microbatches, steps)


def refusal(name: str, ranks: int, microbatches: int) -> str | None:
    """Why torch's runtime would not run a schedule with so many micro-batches; None where it would.

    >>> refusal("1F1B", 4, 2)
    '1F1B needs a micro-batch a stage: microbatches=2 is less than 4 stages'
    """
    stages = {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(name, 0)
    if microbatches < stages:
        return f"{name} needs a micro-batch a stage: microbatches={microbatches} is less than {stages} stages"
    rounds = max(1, microbatches // ranks)
    if name in ("Interleaved1F1B", "ZeroBubble") and microbatches % rounds:
        return (
            f"{name} runs in {rounds} rounds of equal length: they do not divide microbatches={microbatches}"
        )
    return None

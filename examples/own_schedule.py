"""A schedule of one's own, in one file: the micro-batch that came last goes back first.

intarsia pipeline schedules --import examples/own_schedule.py
intarsia pipeline draw --import examples/own_schedule.py --schedule LastInFirstOut
intarsia pipeline run --import examples/own_schedule.py --schedule LastInFirstOut
"""

from collections.abc import Iterator

from intarsia.pipeline import Action, Slot, define_schedule


@define_schedule("LastInFirstOut")
def last_in_first_out(rank: int, ranks: int, microbatches: int, per_rank: int) -> Iterator[Slot]:
    """All forward passes, then the backward passes in the opposite order: caches are still warm."""
    for i in range(microbatches):
        yield Slot(rank, Action.FORWARD, i)
    for i in reversed(range(microbatches)):
        yield Slot(rank, Action.BACKWARD, i)

"""Which of several measured plans to keep: the fastest, unless a simpler one is as fast up to noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_SHOWS_SPREAD = 3  # rounds
_BY_FAR = 1.3


@dataclass(frozen=True)
class Entry:
    """Seconds of one plan, round by round; round `i` of every plan was run in turn with the others'.

    A plan is simpler than another if it has fewer segments or, with as many, fewer options of its own.
    """

    name: str
    segments: int
    seconds: tuple[float, ...]
    options: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def size(self) -> tuple[int, int]:
        return (self.segments, self.options)


def winner(entries: Sequence[Entry], usual: str = "") -> Entry:
    """The plan to keep, a function of the measurements alone.

    It is the simplest of those that no plan beats by more than the spread, and no plan as simple at all.
    Of plans as simple as each other, the `usual` one, taken where nothing is measured, counts as simplest:
    three rounds on a busy machine do not tell two engines apart that differ by a few per cent.
    A plan with fewer rounds than others left the race because it was far behind: it is not compared by
    rounds that it was spared, in which the machine may have been busy.

    >>> winner([Entry("one", 1, (1.0, 1.1, 0.9, 1.0)), Entry("mix", 3, (0.98, 1.11, 0.91, 0.98))]).name
    'one'
    >>> winner([Entry("one", 1, (1.0, 1.1, 0.9, 1.0)), Entry("mix", 3, (0.8, 0.9, 0.7, 0.8))]).name
    'mix'
    >>> winner([Entry("a", 1, (1.5, 2.0, 1.6)), Entry("b", 1, (1.8, 1.5, 1.5))], usual="a").name
    'a'
    """
    rounds = max(len(entry.seconds) for entry in entries)
    entries = [entry for entry in entries if len(entry.seconds) == rounds]
    size = {entry.name: (*entry.size, entry.name != usual) for entry in entries}
    for entry in sorted(entries, key=lambda entry: (size[entry.name], entry.median)):
        simple = [other for other in entries if size[other.name] <= size[entry.name]]
        as_simple = any(other.median < entry.median for other in simple)
        if not as_simple and not any(is_faster(other, entry) for other in entries):
            return entry
    raise AssertionError("the plan of the least median is beaten by none")


def is_faster(one: Entry, other: Entry) -> bool:
    """Whether `one` beats `other` by more than the spread: in the median, and in three rounds of four.

    By far in the median, most rounds are enough: of three, one may have met a hiccup of the machine.
    Rounds are compared pair by pair, since what slows the machine down slows both of a round.
    """
    rounds = list(zip(one.seconds, other.seconds, strict=False))
    won = sum(ours < theirs for ours, theirs in rounds)
    if one.median * _BY_FAR < other.median:
        return 2 * won > len(rounds)
    # One or two rounds show no spread: a difference then has to be one that noise rarely makes.
    return len(rounds) >= _SHOWS_SPREAD and one.median < other.median and 4 * won >= 3 * len(rounds)

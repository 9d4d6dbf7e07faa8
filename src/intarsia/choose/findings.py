"""What was measured on the way to a plan: data that can be printed, kept as JSON and decided upon again."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from intarsia.choose.verdict import Entry


@dataclass(frozen=True)
class Trial:
    """One plan, measured end to end. `blocks` names the engine of every block; a plan by one engine has none.

    `options` counts the options that are not the usual ones, `shape` is a digest of the plan that
    was built, after whatever had to leave an engine; `final` says that it ran in the last, deciding race.
    """

    name: str
    segments: int
    seconds: tuple[float, ...]
    build_s: float
    shape: str = ""
    options: int = 0
    blocks: tuple[str, ...] = ()
    final: bool = False
    error: float = 0.0  # end to end, where engines of shorter arithmetic take part
    quickest: float = 0.0  # the quickest round of all races

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range that holds the middle half of the rounds."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.segments, self.seconds, self.options)


@dataclass(frozen=True)
class BlockCost:
    """One block: where it begins, how many nodes it has, what it takes on each engine.

    Blocks of the same `contents` were measured once.
    """

    place: int
    nodes: int
    at: str
    contents: str
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """Everything that was measured, in seconds a call; of several callers at once, a call's share of them."""

    objective: str
    trials: tuple[Trial, ...] = ()
    chosen: str = ""
    blocks: tuple[BlockCost, ...] = ()
    entering: Mapping[str, float] = field(default_factory=dict)  # the price of a crossing into an engine
    left_out: tuple[str, ...] = ()  # what was not measured, and why
    budget_s: float = 0.0
    spent_s: float = 0.0
    complete: bool = True  # whether all was measured that a larger budget would measure
    tolerance: float | None = None  # what the error may be; None where arithmetic is the model's own
    errors: Mapping[str, float] = field(default_factory=dict)  # of the chosen plan's segments, by first node
    remembered: bool = False  # whether this was measured by an earlier compile

    def trial(self, name: str) -> Trial:
        """The trial of that name."""
        return next(trial for trial in self.trials if trial.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, tables, texts and numbers."""
        return asdict(self)

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> Findings:
        """The findings of `as_dict`, also after a way through JSON; ValueError for damaged ones."""
        fields = dict(table)
        fields["trials"] = tuple(
            Trial(**{**trial, "seconds": tuple(trial["seconds"]), "blocks": tuple(trial["blocks"])})
            for trial in fields["trials"]
        )
        fields["blocks"] = tuple(BlockCost(**block) for block in fields["blocks"])
        fields["left_out"] = tuple(fields["left_out"])
        findings = Findings(**fields)
        if strange := [n for n in findings.numbers if not isinstance(n, int | float) or not n >= 0]:
            raise ValueError(f"{strange[0]!r} is nothing that is measured")
        return findings

    @property
    def numbers(self) -> list[float]:
        """Everything that is a time, a count or an error."""
        of_trials = [(*t.seconds, t.segments, t.build_s, t.options, t.error, t.quickest) for t in self.trials]
        of_blocks = [(block.place, block.nodes, *block.seconds.values()) for block in self.blocks]
        own = (self.budget_s, self.spent_s, self.tolerance or 0.0)
        tables = (*self.entering.values(), *self.errors.values())
        return [n for numbers in (own, tables, *of_trials, *of_blocks) for n in numbers]


def engine_seconds(found: Findings, engines: Sequence[str]) -> dict[str, float]:
    """What the chosen plan spends on each engine in a call, where it was measured.

    >>> blocks = (BlockCost(0, 1, "", "", {"a": 2.0}), BlockCost(1, 1, "", "", {"b": 1.0}))
    >>> mix = Trial("mix", 2, (3.1,), 0.0, blocks=("a", "b"))
    >>> found = Findings("latency", (mix,), "mix", blocks)
    >>> engine_seconds(found, ("a", "b")), segment_seconds(found, ("a", "b"), 2)
    ({'a': 2.0, 'b': 1.0}, [2.0, 1.0])
    """
    chosen = found.trial(found.chosen)
    if len(engines) == 1:
        return {engines[0]: chosen.median}
    seconds: dict[str, float] = {}
    for engine, block in zip(chosen.blocks, found.blocks, strict=False):
        seconds[engine] = seconds.get(engine, 0.0) + block.seconds.get(engine, 0.0)
    return seconds


def segment_seconds(found: Findings, engines: Sequence[str], count: int) -> list[float | None]:
    """What each of `count` segments takes: the blocks of a mix that follow each other on one engine."""
    chosen = found.trial(found.chosen)
    if count == 1:
        return [chosen.median]
    parts: list[float | None] = []
    before = None
    for engine, block in zip(chosen.blocks, found.blocks, strict=False):
        if engine != before:
            parts.append(0.0)
        parts[-1] = (parts[-1] or 0.0) + block.seconds.get(engine, 0.0)
        before = engine
    return parts if len(parts) == count else [None] * count

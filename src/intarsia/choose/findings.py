"""What was measured on the way to a plan: data that can be printed, kept as JSON and decided upon again."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
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

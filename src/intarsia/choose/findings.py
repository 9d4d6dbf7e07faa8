"""Findings: the measurements of a search, the decision by them, and their text and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from intarsia.drawing import Drawing, DrawnTrial
from intarsia.errors import count_text
from intarsia.graph.plan import Plan
from intarsia.tracing import Profile

_SHOWS_SPREAD = 3  # rounds
_BY_FAR = 1.3


@dataclass(frozen=True)
class Trial:
    """One plan, measured end to end.

    `seconds` has one number a round; plans of a race run in turns. `options` counts the options that differ
    from the usual ones. `shape` is a digest of the plan that was built. `blocks` has the engine of every
    block, if the plan is a mix. `final` says whether the plan ran in the last race, which decides.
    """

    name: str
    segments: int
    seconds: tuple[float, ...]
    options: int = 0
    build_s: float = 0.0
    shape: str = ""
    blocks: tuple[str, ...] = ()
    final: bool = False
    error: float = 0.0  # end to end, for engines of shorter arithmetic
    quickest: float = 0.0  # the quickest round of all races

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range between the first and the third quartile of the rounds."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def size(self) -> tuple[int, int]:
        """A plan is simpler if it has fewer segments or, with equally many, fewer options of its own."""
        return (self.segments, self.options)


def winner(trials: Sequence[Trial], usual: str = "") -> Trial:
    """The plan to use, which depends on the measurements only.

    It is the simplest plan that no other is faster than by more than the spread, and no equally simple plan
    is faster than at all. Of equally simple plans, the `usual` one, which is used without measurements,
    counts as the simplest: three rounds on a busy machine cannot order engines that differ by a few per cent.
    A plan with fewer rounds than the others left the race because it was slow, and is not considered.

    >>> winner([Trial("one", 1, (1.0, 1.1, 0.9, 1.0)), Trial("mix", 3, (0.98, 1.11, 0.91, 0.98))]).name
    'one'
    >>> winner([Trial("one", 1, (1.0, 1.1, 0.9, 1.0)), Trial("mix", 3, (0.8, 0.9, 0.7, 0.8))]).name
    'mix'
    >>> winner([Trial("a", 1, (1.5, 2.0, 1.6)), Trial("b", 1, (1.8, 1.5, 1.5))], usual="a").name
    'a'
    """
    rounds = max(len(trial.seconds) for trial in trials)
    trials = [trial for trial in trials if len(trial.seconds) == rounds]
    size = {trial.name: (*trial.size, trial.name != usual) for trial in trials}
    for trial in sorted(trials, key=lambda trial: (size[trial.name], trial.median)):
        simple = [other for other in trials if size[other.name] <= size[trial.name]]
        as_simple = any(other.median < trial.median for other in simple)
        if not as_simple and not any(is_faster(other, trial) for other in trials):
            return trial
    raise AssertionError("the plan with the least median is not slower than another")


def is_faster(one: Trial, other: Trial) -> bool:
    """Whether `one` is faster than `other` by more than the spread: in the median and in 3 of 4 rounds.

    If it is much faster in the median, most rounds are enough, since one of three may have been disturbed.
    Rounds are compared in pairs, since a disturbance of the machine slows both plans of a round.
    """
    rounds = list(zip(one.seconds, other.seconds, strict=False))
    won = sum(ours < theirs for ours, theirs in rounds)
    if one.median * _BY_FAR < other.median:
        return 2 * won > len(rounds)
    # One or two rounds show no spread, so only a large difference counts.
    return len(rounds) >= _SHOWS_SPREAD and one.median < other.median and 4 * won >= 3 * len(rounds)


def is_decided(trials: Sequence[Trial], rounds: int, usual: str = "") -> bool:
    """Whether the simplest plan wins without the rest of the `rounds`.

    Every other plan has lost so many rounds to it that it cannot win three of four, and none is much faster.

    >>> one, mix = Trial("one", 1, (1.0, 1.1, 1.0)), Trial("mix", 3, (1.1, 1.2, 1.1))
    >>> is_decided([one, mix], rounds=9), is_decided([one, mix], rounds=20)
    (True, False)
    """
    simplest, *others = sorted(trials, key=lambda trial: (*trial.size, trial.name != usual))
    for other in others:
        lost = sum(a < b for a, b in zip(simplest.seconds, other.seconds, strict=True))
        is_as_simple = other.size == simplest.size and simplest.name != usual
        if is_as_simple or 4 * (rounds - lost) >= 3 * rounds or is_faster(other, simplest):
            return False
    return True


@dataclass(frozen=True)
class BlockCost:
    """One block: where it begins, how many nodes it has, and its seconds on each engine.

    Blocks with the same `contents` were measured once.
    """

    place: int
    nodes: int
    at: str
    contents: str
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """All measurements of a search, in seconds a call; with several callers, the share of one call."""

    objective: str
    trials: tuple[Trial, ...] = ()
    chosen: str = ""
    blocks: tuple[BlockCost, ...] = ()
    entering: Mapping[str, float] = field(default_factory=dict)  # the cost of a crossing into an engine
    left_out: tuple[str, ...] = ()  # what was not measured, with reasons
    budget_s: float = 0.0
    spent_s: float = 0.0
    complete: bool = True  # whether a larger budget would measure nothing more
    tolerance: float | None = None  # the largest error allowed; None for the model's own arithmetic
    errors: Mapping[str, float] = field(default_factory=dict)  # of the fastest plan's segments, by first node
    remembered: bool = False  # whether an earlier compile measured this

    def trial(self, name: str) -> Trial:
        """The trial of that name."""
        return next(trial for trial in self.trials if trial.name == name)

    def as_dict(self) -> dict[str, Any]:
        """The findings as lists, dicts, strings and numbers."""
        return asdict(self)

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> Findings:
        """The findings from a result of `as_dict`, also one from JSON; ValueError if it is damaged."""
        fields = dict(table)
        fields["trials"] = tuple(
            Trial(**{**trial, "seconds": tuple(trial["seconds"]), "blocks": tuple(trial["blocks"])})
            for trial in fields["trials"]
        )
        fields["blocks"] = tuple(BlockCost(**block) for block in fields["blocks"])
        fields["left_out"] = tuple(fields["left_out"])
        findings = Findings(**fields)
        if strange := [n for n in findings.numbers if not isinstance(n, int | float) or not n >= 0]:
            raise ValueError(f"{strange[0]!r} is not a measurement")
        return findings

    @property
    def numbers(self) -> list[float]:
        """Everything that is a time, a count or an error."""
        of_trials = [(*t.seconds, t.segments, t.build_s, t.options, t.error, t.quickest) for t in self.trials]
        of_blocks = [(block.place, block.nodes, *block.seconds.values()) for block in self.blocks]
        own = (self.budget_s, self.spent_s, self.tolerance or 0.0)
        tables = (*self.entering.values(), *self.errors.values())
        return [n for numbers in (own, tables, *of_trials, *of_blocks) for n in numbers]


def engine_seconds(findings: Findings, engines: Sequence[str]) -> dict[str, float]:
    """The seconds of a call on each engine of the chosen plan, if they were measured.

    >>> blocks = (BlockCost(0, 1, "", "", {"a": 2.0}), BlockCost(1, 1, "", "", {"b": 1.0}))
    >>> mix = Trial("mix", 2, (3.1,), blocks=("a", "b"))
    >>> findings = Findings("latency", (mix,), "mix", blocks)
    >>> engine_seconds(findings, ("a", "b")), segment_seconds(findings, 2)
    ({'a': 2.0, 'b': 1.0}, [2.0, 1.0])
    """
    chosen = findings.trial(findings.chosen)
    if len(engines) == 1:
        return {engines[0]: chosen.median}
    seconds: dict[str, float] = {}
    for engine, block in zip(chosen.blocks, findings.blocks, strict=False):
        seconds[engine] = seconds.get(engine, 0.0) + block.seconds.get(engine, 0.0)
    return seconds


def segment_seconds(findings: Findings, count: int) -> list[float | None]:
    """The seconds of each of `count` segments, which are consecutive blocks of a mix on one engine."""
    chosen = findings.trial(findings.chosen)
    if count == 1:
        return [chosen.median]
    parts: list[float | None] = []
    before = None
    for engine, block in zip(chosen.blocks, findings.blocks, strict=False):
        if engine != before:
            parts.append(0.0)
        parts[-1] = (parts[-1] or 0.0) + block.seconds.get(engine, 0.0)
        before = engine
    return parts if len(parts) == count else [None] * count


_BUSY = 1.5  # if the median is this many times the fastest round, the machine was busy


def findings_text(findings: Findings) -> str:
    """The findings in lines, with the fastest plan first and times in milliseconds."""
    lines = [*_trials(findings)] if findings.trials else ["nothing was measured"]
    if findings.blocks:
        lines += _blocks(findings)
    if findings.entering:
        prices = ", ".join(f"{engine} {seconds * 1e3:.3f}" for engine, seconds in findings.entering.items())
        lines.append(f"price of a crossing into an engine, ms: {prices}")
    if findings.tolerance is not None and findings.trials:
        whole = findings.trial(findings.chosen).error
        lines.append(f"error end to end {whole:.2g} of the largest value; tolerance={findings.tolerance:g}")
        lines.append(
            "  measured on the examples, in each row of a batch; the error of other inputs may be larger"
        )
        errors = findings.errors.items()
        lines += [f"  error of the segment from {node}: {error:.2g}" for node, error in errors]
    lines += [f"left out: {reason}" for reason in findings.left_out]
    return "\n".join(lines)


def _trials(findings: Findings) -> Iterator[str]:
    what = "ms a call" if findings.objective == "latency" else "ms a call's share, several callers"
    how = "remembered" if findings.remembered else f"in {findings.spent_s:.1f} s"
    yield f"measured end to end ({what}; median and spread of interleaved rounds; {how}):"
    rows = [(trial.name, trial) for trial in sorted(findings.trials, key=_rank)]
    width = max((len(name) for name, _ in rows), default=0)
    best = findings.trial(findings.chosen).median
    for name, trial in rows:
        mark = "*" if name == findings.chosen else " "
        count = count_text(trial.segments, "segment")
        ratio = f"{trial.median / best:.2f}x" if name != findings.chosen else "chosen"
        dropped = "" if trial.final else ", not in the last race"
        if trial.quickest and trial.median > _BUSY * trial.quickest:
            dropped += f"; the machine was busy: its quickest round took {trial.quickest * 1e3:.3f}"
        yield f" {mark} {name:<{width}}  {_ms(trial)}  {ratio:>6}  {count}{dropped}"


def _rank(trial: Trial) -> tuple[bool, float]:
    return (not trial.final, trial.median)


def _ms(trial: Trial) -> str:
    spread = "        " if len(trial.seconds) < 2 else f" ±{trial.spread * 1e3:6.3f}"
    return f"{trial.median * 1e3:9.3f}{spread}"


def _blocks(findings: Findings) -> Iterator[str]:
    engines = list(dict.fromkeys(engine for block in findings.blocks for engine in block.seconds))
    runs = findings.trial(findings.chosen).blocks if findings.trials else ()
    yield "blocks, ms (equal blocks are measured once):"
    yield f"  {'block':<9}{'nodes':>5}  " + "  ".join(f"{engine:>11}" for engine in engines) + "  begins at"
    for first, last, block in _runs(findings.blocks, runs):
        name = f"{first}" if first == last else f"{first}-{last}"
        cells = []
        for engine in engines:
            mark = "*" if runs and runs[first] == engine else " "
            seconds = block.seconds.get(engine)
            cells.append(f"{'-' if seconds is None else format(seconds * 1e3, '.3f'):>10}{mark}")
        yield f"  {name:<9}{block.nodes:>5}  {'  '.join(cells)}  {block.at}"


def _runs(blocks: Sequence[BlockCost], runs: Sequence[str]) -> Iterator[tuple[int, int, BlockCost]]:
    """The first and last number of equal neighbours on the same engine, with the first block."""
    first = 0
    for number in range(1, len(blocks) + 1):
        same = number < len(blocks) and blocks[number].contents == blocks[first].contents
        if same and (not runs or runs[number] == runs[first]):
            continue
        yield first, number - 1, blocks[first]
        first = number


MOVED = "its block ran faster on"
EAGER = "the unchanged model was the fastest plan"


@dataclass(frozen=True, eq=False)
class MeasuredPlan(Plan):
    """A plan and its findings; `str` and `to_json` contain both."""

    findings: Findings = field(default_factory=lambda: Findings("latency"))

    def __str__(self) -> str:
        return f"{super().__str__()}\n{findings_text(self.findings)}"

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(super().__rich__(), Text(findings_text(self.findings)))

    def drawing(self, profile: Profile | None = None) -> Drawing:
        """The contents of drawings, with the measurements."""
        findings, drawn = self.findings, super().drawing(profile)
        if not findings.trials:
            return drawn
        ranked = sorted(findings.trials, key=_rank)
        seconds = segment_seconds(findings, len(drawn.segments))
        segments = (replace(s, seconds=t) for s, t in zip(drawn.segments, seconds, strict=True))
        trials = (
            DrawnTrial(t.name, t.median, t.spread, t.segments, t.name == findings.chosen, t.final)
            for t in ranked
        )
        how = "by an earlier compile" if findings.remembered else f"in {findings.spent_s:.1f} s"
        if profile is None:
            by_engine = engine_seconds(findings, drawn.engines)
            timed_how = "Measured when the plan was chosen."
            drawn = replace(drawn, engine_seconds=by_engine, segments=tuple(segments), timed_how=timed_how)
        return replace(
            drawn,
            trials=tuple(trials),
            measured_how=f"Median of interleaved rounds, measured {how} ({findings.objective}).",
            notes=(*drawn.notes, *(f"not measured: {reason}" for reason in findings.left_out)),
        )

    def to_json(self) -> str:
        """The plan as JSON, with the measurements."""
        return json.dumps({**json.loads(super().to_json()), "measured": self.findings.as_dict()}, indent=1)


def measured_plan(plan: Plan, findings: Findings) -> MeasuredPlan:
    """The plan with its findings, without the reasons of nodes that a mix moved."""
    segments = []
    for segment in plan.segments:
        reasons = {
            node: rest
            for node, why in segment.reasons.items()
            if (rest := {e: reason for e, reason in why.items() if not reason.startswith((MOVED, EAGER))})
        }
        segments.append(replace(segment, reasons=reasons))
    strategy = f"measurement ({findings.objective})"
    return MeasuredPlan(tuple(segments), strategy, plan.bodies, plan.details, findings)

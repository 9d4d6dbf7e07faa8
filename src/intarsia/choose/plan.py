"""A plan that carries what it was chosen by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from intarsia.choose.findings import Findings, engine_seconds, findings_text, segment_seconds
from intarsia.drawing import Drawing, DrawnTrial
from intarsia.graph.plan import Plan
from intarsia.tracing import Profile

MOVED = "its block ran faster on"
EAGER = "the unchanged model was the fastest plan"


@dataclass(frozen=True, eq=False)
class MeasuredPlan(Plan):
    """A plan and its findings; `str` tells both, `to_json` writes both."""

    findings: Findings = field(default_factory=lambda: Findings("latency"))

    def __str__(self) -> str:
        return f"{super().__str__()}\n{findings_text(self.findings)}"

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(super().__rich__(), Text(findings_text(self.findings)))

    def drawing(self, profile: Profile | None = None) -> Drawing:
        """What pictures show, with what was measured."""
        findings, drawn = self.findings, super().drawing(profile)
        if not findings.trials:
            return drawn
        ranked = sorted(findings.trials, key=lambda trial: (not trial.final, trial.median))
        seconds = segment_seconds(findings, drawn.engines, len(drawn.segments))
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
        """Segments, and everything that was measured."""
        return json.dumps({**json.loads(super().to_json()), "measured": self.findings.as_dict()}, indent=1)


def measured_plan(plan: Plan, findings: Findings) -> MeasuredPlan:
    """The plan with its findings; that a node went elsewhere is told there, not node by node."""
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

"""A plan that carries what it was chosen by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from intarsia.choose.findings import Findings
from intarsia.choose.findings_text import findings_text
from intarsia.graph.plan import Plan

MOVED = "its block was measured to run better on"
EAGER = "the model as it is was measured to run best"


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

    def to_json(self) -> str:
        """Segments, and everything that was measured."""
        return json.dumps({**json.loads(super().to_json()), "measured": self.findings.as_dict()}, indent=1)


def measured_plan(plan: Plan, findings: Findings) -> MeasuredPlan:
    """The plan with its findings; that a node went elsewhere is told there, not node by node."""
    segments = []
    for segment in plan.segments:
        kept = {
            node: rest
            for node, why in segment.reasons.items()
            if (rest := {e: reason for e, reason in why.items() if not reason.startswith((MOVED, EAGER))})
        }
        segments.append(replace(segment, reasons=kept))
    return MeasuredPlan(tuple(segments), f"measurement ({findings.objective})", findings)

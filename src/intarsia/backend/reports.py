"""A report for each graph that Dynamo passed to the backend."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

_MOST = 1000  # graphs remembered


@dataclass(frozen=True)
class GraphReport:
    """One graph: where it begins in the caller's code, what runs on engines, and what else there is to know.

    `nodes` counts the operators after lowering and `on_engines` those of them on engines; for a graph that
    runs as captured both are 0 and `reason` says why. `programs` is how often it was compiled: once for each
    set of weights, and again where Dynamo's sizes did not hold.
    """

    number: int
    where: str
    nodes: int = 0
    on_engines: int = 0
    engines: tuple[str, ...] = ()
    programs: int = 0
    sizes_vary: bool = False
    reason: str | None = None
    plan: str = ""
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The share of the nodes that run on engines."""
        return self.on_engines / self.nodes if self.nodes else 0.0

    def __str__(self) -> str:
        head = f"graph {self.number} at {self.where}: "
        if self.reason is not None and not self.programs:
            body = f"runs as captured, in PyTorch: {self.reason}"
        else:
            sizes = ", for sizes that vary" if self.sizes_vary else ""
            body = (
                f"{self.on_engines} of {self.nodes} nodes on engines"
                f" ({', '.join(self.engines)}){sizes}, compiled {self.programs}x"
            )
            if self.reason is not None:
                body += f"; some calls run as captured, in PyTorch: {self.reason}"
        return "\n".join([head + body, *(f"  {note}" for note in self.notes)])


_reports: deque[GraphReport] = deque(maxlen=_MOST)
_count = 0


def reports(*, clear: bool = False) -> tuple[GraphReport, ...]:
    """What each graph given by `torch.compile(backend="intarsia")` became, oldest first.

    With `clear`, they are forgotten afterwards. The last thousand graphs of the process are remembered.
    """
    reports = tuple(_reports)
    if clear:
        _reports.clear()
    return reports


def new_report(where: str) -> GraphReport:
    """The report of another graph, of which nothing is known yet."""
    global _count
    _count += 1
    report = GraphReport(_count, where)
    _reports.append(report)
    return report


def update(report: GraphReport, **changes: object) -> GraphReport:
    """The report with these changes, also for `reports()`."""
    changed = replace(report, **changes)  # type: ignore[arg-type]
    for place, known in enumerate(_reports):
        if known.number == report.number:
            _reports[place] = changed
    return changed


def joined(notes: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Notes without those said before."""
    return tuple(dict.fromkeys((*notes, *more)))

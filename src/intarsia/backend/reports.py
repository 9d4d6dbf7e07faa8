"""A report for each graph that Dynamo passed to the backend."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

_MOST = 1000  # graphs


@dataclass(frozen=True)
class GraphReport:
    """The report of one graph: where it begins in the user's code, and what runs on engines.

    `nodes` is the number of operators after lowering, and `on_engines` the number of those on engines. For a
    graph that runs as captured, both are 0 and `reason` says why. `programs` is the number of compiles: one
    for each set of weights, and more if sizes varied outside Dynamo's ranges.
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
    """The report of each graph of `torch.compile(backend="intarsia")`, oldest first.

    With `clear`, they are deleted afterwards. The last thousand graphs of the process have reports.
    """
    reports = tuple(_reports)
    if clear:
        _reports.clear()
    return reports


def new_report(where: str) -> GraphReport:
    """A new report, which is empty so far."""
    global _count
    _count += 1
    report = GraphReport(_count, where)
    _reports.append(report)
    return report


def update(report: GraphReport, **changes: object) -> GraphReport:
    """The report with these changes, also for `reports()`."""
    changed = replace(report, **changes)  # type: ignore[arg-type]
    for place, other in enumerate(_reports):
        if other.number == report.number:
            _reports[place] = changed
    return changed


def joined(notes: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """The notes, each once."""
    return tuple(dict.fromkeys((*notes, *more)))

"""Named spans of time: segments and pipeline stages, for `intarsia.profile` and for torch.profiler."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from torch import nn
from torch.autograd import profiler as torch_profiler

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Span:
    """A span of time by `time.perf_counter`, with its name and track."""

    name: str
    track: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Profile:
    """The recorded spans of all calls. `print` shows the times of segments and crossings."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @property
    def segments(self) -> dict[str, list[float]]:
        """Seconds of each segment, or stage of a pipeline, call by call."""
        table: dict[str, list[float]] = {}
        for span in self.spans:
            table.setdefault(span.name, []).append(span.seconds)
        return table

    @property
    def crossings(self) -> dict[str, list[float]]:
        """Seconds between the end of a segment and the start of the next one in the same call."""
        table: dict[str, list[float]] = {}
        last: dict[str, Span] = {}  # by track
        for span in sorted(self.spans, key=lambda span: span.start):
            before = last.get(span.track)
            last[span.track] = span
            if before is not None and _number(span) == _number(before) + 1:
                name = f"{before.name} > {span.name.removeprefix(_PREFIX)}"
                table.setdefault(name, []).append(span.start - before.end)
        return table

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto (https://ui.perfetto.dev) opens: a track for each thread or stage."""
        tracks = list(dict.fromkeys(span.track for span in self.spans))
        first = min((span.start for span in self.spans), default=0.0)
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": track}}
            for number, track in enumerate(tracks)
        ]
        events = [
            {
                "name": span.name,
                "ph": "X",
                "pid": 0,
                "tid": tracks.index(span.track),
                "ts": (span.start - first) * 1e6,
                "dur": span.seconds * 1e6,
            }
            for span in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}), encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"{'':40} {'calls':>6} {'mean ms':>9} {'total ms':>9}"]
        for name, seconds in {**self.segments, **self.crossings}.items():
            total = sum(seconds) * 1e3
            lines.append(f"{name:40} {len(seconds):>6} {total / len(seconds):>9.3f} {total:>9.3f}")
        return "\n".join(lines)


_PREFIX = "intarsia::"


def segment_name(number: int, engine: str) -> str:
    """The label of a segment in profiles and in torch's profiler."""
    return f"{_PREFIX}{number}::{engine}"


def _number(span: Span) -> float:
    """The number of a segment in its plan; NaN for other spans, so that no number follows it."""
    number = span.name.removeprefix(_PREFIX).partition("::")[0]
    return int(number) if number.isdecimal() else math.nan


_recording: list[Profile] = []


@contextmanager
def profile(module: nn.Module | None = None) -> Iterator[Profile]:
    """Record the times of segments, of crossings between segments, and of pipeline stages in the block.

    Only calls of `module` are recorded; without one, all calls of compiled and pipelined modules.
    Segments run one after the other, so a crossing is the time between two of them.

    Example:
        >>> import intarsia, torch
        >>> fast = intarsia.compile(torch.nn.ReLU(), (torch.ones(2),), engines="pytorch")
        >>> with intarsia.profile(fast) as p:
        ...     _ = fast(torch.ones(2))
        >>> list(p.segments)
        ['intarsia::0::pytorch']
    """
    recorded = Profile()
    if module is None:
        _recording.append(recorded)
        try:
            yield recorded
        finally:
            _recording.remove(recorded)
        return
    begin = module.register_forward_pre_hook(lambda *_: _recording.append(recorded))
    end = module.register_forward_hook(lambda *_: _recording.remove(recorded), always_call=True)
    try:
        yield recorded
    finally:
        begin.remove()
        end.remove()


def is_traced() -> bool:
    """Whether a `profile` or torch's profiler records now."""
    # torch sets this private flag while a profiler runs (2.6 to 2.13); without it, there are no labels.
    return bool(_recording) or getattr(torch_profiler, "_is_profiler_enabled", False)


def traced(name: str, track: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function, and record its time under a name if a profiler records."""
    if not is_traced():
        return function(*args, **kwargs)
    start = time.perf_counter()
    with torch_profiler.record_function(name):
        result = function(*args, **kwargs)
    end = time.perf_counter()
    for recorded in dict.fromkeys(_recording):  # once, also if two threads call its module
        recorded.spans.append(Span(name, track or threading.current_thread().name, start, end))
    return result

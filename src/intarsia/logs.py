"""Progress of a compile: `logging.getLogger("intarsia")`, and a line on a terminal."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import fx

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# INFO has each stage of a compile with its time, DEBUG each refusal of a node.
LOG = logging.getLogger("intarsia")
LOG.addHandler(logging.NullHandler())
TORCH_LOG = LOG.getChild("torch")


def log_refusals(refusals: Mapping[fx.Node, Mapping[str, str]]) -> None:
    """Log each node that an engine refuses, with the reason."""
    if LOG.isEnabledFor(logging.DEBUG):
        for node, reasons in refusals.items():
            for engine, reason in reasons.items():
                LOG.debug("%s does not take %s (%s): %s", engine, node.name, node.target, reason)


def stage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Log a method's time under a name, and show on a terminal what runs and how long it may take.

    The time is assumed to grow with `size` of the method's object.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            began, size = time.perf_counter(), args[0].size  # type: ignore[attr-defined]
            with working(name, _seconds_each().get(name, 0.0) * size if _is_watched() else None):
                result = method(*args, **kwargs)
            seconds = time.perf_counter() - began
            LOG.info("%s: %.2f s", name, seconds)
            if _is_watched():
                _seconds_each({name: seconds / size})
            return result

        return timed

    return decorate


# Seconds for one module of BERT-base on 2 cores, until a first compile on this machine replaces them.
_FIRST_GUESS = {
    "running the model": 0.01,
    "exporting and lowering": 0.02,
    "comparing the graph with the model": 0.01,
    "asking the engines about every node": 0.003,
    "building the segments": 0.015,
    "comparing the whole with the model": 0.005,
}


def _seconds_each(latest: Mapping[str, float] | None = None) -> dict[str, float]:
    """The seconds of each stage for one unit of size, in the last compile on this machine."""
    from intarsia.cache.store import JsonStore, cache_directory

    store = JsonStore(cache_directory() / "stages.json")
    if latest is not None:
        store.update(latest)
        return {}
    stored = {name: value for name, value in store.read().items() if isinstance(value, float)}
    return _FIRST_GUESS | stored


_lines: list[Progress] = []  # the innermost is last, and the only one on the terminal


def _is_watched() -> bool:
    return threading.current_thread() is threading.main_thread() and sys.stderr.isatty()


@contextmanager
def working(name: str, seconds: float | None = None) -> Iterator[None]:
    """Show on a terminal what runs, for how long, and how long it may still take.

    Nested work replaces the line. Without a terminal, nothing is written.
    """
    if not _is_watched():
        yield
        return
    line = _line(name, seconds)
    if _lines:
        _lines[-1].stop()
    _lines.append(line)
    line.start()
    try:
        yield
    finally:
        line.stop()
        _lines.remove(line)
        if _lines:
            _lines[-1].start()


def tell(text: str, left_s: float | None = None) -> None:
    """Show what runs now on the line, if there is one, and how long it may still take."""
    if _lines and _is_watched():
        (task,) = _lines[-1].tasks
        expected = None if left_s is None else (task.elapsed or 0.0) + left_s
        _lines[-1].update(task.id, description=text, expected=expected)


def tell_share(done: int, total: int) -> None:
    """Show the share of the work that is done on the line, if there is one; the time left is estimated."""
    if _lines and _is_watched() and done:
        (task,) = _lines[-1].tasks
        expected = (task.elapsed or 0.0) * total / done
        _lines[-1].update(task.id, count=f" {done}/{total}", expected=expected)


def counted(items: Iterable[T], total: int, name: str) -> Iterator[T]:
    """The items, counted on a terminal.

    >>> list(counted(iter("ab"), 2, "spelling"))
    ['a', 'b']
    """
    with working(name):
        for number, item in enumerate(items):
            yield item
            tell_share(number + 1, total)


def _line(name: str, seconds: float | None) -> Progress:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
    from rich.text import Text

    class Line(ProgressColumn):
        """The times come first, since a narrow terminal cuts off the end."""

        def render(self, task: Task) -> Text:
            elapsed, expected = task.elapsed or 0.0, task.fields["expected"]
            left = 0.0 if expected is None else expected - elapsed
            times = f"{elapsed:.0f} s" + (f", about {left:.0f} s left" if left >= 1 else "")
            line = f"intarsia ({times}): {task.description}{task.fields['count']}"
            return Text(line, no_wrap=True, overflow="ellipsis")

    # Output of the model goes above the line, unless it goes into a pipe.
    shares = sys.stdout is not None and sys.stdout.isatty()
    console = Console(stderr=True)
    line = Progress(SpinnerColumn(), Line(), console=console, transient=True, redirect_stdout=shares)
    line.add_task(name, total=None, expected=seconds, count="")
    return line


def _is_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


@contextmanager
def torch_logs_kept() -> Iterator[None]:
    """In the `with` block, torch's logs go to `intarsia.torch` at DEBUG, unless TORCH_LOGS is set.

    An export that fails logs a traceback of about forty lines, and the error that is raised says the same.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return

    def redirect(record: logging.LogRecord) -> bool:
        TORCH_LOG.debug("%s: %s", record.name, record.getMessage())
        return False

    # torch adds handlers to many of its loggers, not only to their root.
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if _is_torch(name)]
    changed = list({id(handler): handler for logger in loggers for handler in logger.handlers}.values())
    for handler in changed:
        handler.addFilter(redirect)
    try:
        yield
    finally:
        for handler in changed:
            handler.removeFilter(redirect)

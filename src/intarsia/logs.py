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

# INFO: each stage of a compile with its time. DEBUG: each refusal of a node.
LOG = logging.getLogger("intarsia")
LOG.addHandler(logging.NullHandler())
TORCH_LOG = LOG.getChild("torch")


def log_refusals(refusals: Mapping[fx.Node, Mapping[str, str]]) -> None:
    """Log each node that an engine does not take, with the reason."""
    if LOG.isEnabledFor(logging.DEBUG):
        for node, reasons in refusals.items():
            for engine, reason in reasons.items():
                LOG.debug("%s does not take %s (%s): %s", engine, node.name, node.target, reason)


def stage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that logs a method's time, and shows on a terminal its name and its expected time.

    The expected time is proportional to `size` of the method's object.
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


# Seconds per module of BERT-base on 2 cores; the first compile on a machine replaces them.
_DEFAULT_SECONDS = {
    "running the model": 0.01,
    "exporting and lowering": 0.02,
    "comparing the graph with the model": 0.01,
    "asking the engines about every node": 0.003,
    "building the segments": 0.015,
    "comparing the whole with the model": 0.005,
}


def _seconds_each(latest: Mapping[str, float] | None = None) -> dict[str, float]:
    """The seconds of each stage per unit of size, in the last compile on this machine; stores `latest`."""
    from intarsia.cache.store import JsonStore, cache_directory

    store = JsonStore(cache_directory() / "stages.json")
    if latest is not None:
        store.update(latest)
        return {}
    measured = {name: value for name, value in store.read().items() if isinstance(value, float)}
    return _DEFAULT_SECONDS | measured


_lines: list[Progress] = []  # the innermost is last; only this one is on the terminal


def _is_watched() -> bool:
    return threading.current_thread() is threading.main_thread() and sys.stderr.isatty()


@contextmanager
def working(name: str, seconds: float | None = None) -> Iterator[None]:
    """Show a line on a terminal while the block runs: its name, the elapsed time, and the time left.

    A block inside the block replaces the line for a while. Without a terminal, nothing is written.
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
    """Change the text of the line, and the time left, if there is a line."""
    if _lines and _is_watched():
        (task,) = _lines[-1].tasks
        expected = None if left_s is None else (task.elapsed or 0.0) + left_s
        _lines[-1].update(task.id, description=text, expected=expected)


def tell_share(done: int, total: int) -> None:
    """Show on the line, if there is one, how much is done; the time left is computed from it."""
    if _lines and _is_watched() and done:
        (task,) = _lines[-1].tasks
        expected = (task.elapsed or 0.0) * total / done
        _lines[-1].update(task.id, count=f" {done}/{total}", expected=expected)


def counted(items: Iterable[T], total: int, name: str) -> Iterator[T]:
    """The items, with a line on a terminal that counts them.

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

    # On a terminal, the output of the model is printed above the line. A pipe must get it unchanged.
    redirect = sys.stdout is not None and sys.stdout.isatty()
    console = Console(stderr=True)
    line = Progress(SpinnerColumn(), Line(), console=console, transient=True, redirect_stdout=redirect)
    line.add_task(name, total=None, expected=seconds, count="")
    return line


@contextmanager
def torch_logs_kept() -> Iterator[None]:
    """Send torch's logs to `intarsia.torch` at DEBUG for a while, unless TORCH_LOGS is set.

    A failed export logs a traceback of about forty lines, which the raised error repeats.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return

    def redirect(record: logging.LogRecord) -> bool:
        TORCH_LOG.debug("%s: %s", record.name, record.getMessage())
        return False

    # Many loggers of torch have handlers, not only their root.
    names = [name for name in list(logging.root.manager.loggerDict) if name.partition(".")[0] == "torch"]
    handlers = {id(handler): handler for name in names for handler in logging.getLogger(name).handlers}
    for handler in handlers.values():
        handler.addFilter(redirect)
    try:
        yield
    finally:
        for handler in handlers.values():
            handler.removeFilter(redirect)

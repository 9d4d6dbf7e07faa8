"""What a compile tells while it runs: `logging.getLogger("intarsia")`, and a line on a terminal."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import fx

P = ParamSpec("P")
R = TypeVar("R")

# INFO has each stage of a compile with its time, DEBUG each refusal of a node.
LOG = logging.getLogger("intarsia")
LOG.addHandler(logging.NullHandler())
TORCH_LOG = LOG.getChild("torch")


def log_refusals(refusals: Mapping[fx.Node, Mapping[str, str]]) -> None:
    """Each node that an engine does not take, with the reason."""
    if LOG.isEnabledFor(logging.DEBUG):
        for node, reasons in refusals.items():
            for engine, reason in reasons.items():
                LOG.debug("%s does not take %s (%s): %s", engine, node.name, node.target, reason)


_shown: list[Progress] = []  # the line on the terminal, while there is one


def stage(name: str, *, shown: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Log a function's time under a name, and show the name on a terminal meanwhile."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            with _on_terminal(name, shown):
                result = function(*args, **kwargs)
            LOG.info("%s: %.2f s", name, time.perf_counter() - began)
            return result

        return timed

    return decorate


@contextmanager
def _on_terminal(name: str, shown: bool) -> Iterator[None]:
    """One line on stderr with the time so far. Work inside work takes the line over, or takes it away."""
    if threading.current_thread() is not threading.main_thread() or not sys.stderr.isatty():
        yield
        return
    outer = _shown[-1] if _shown else None
    if outer is not None:
        outer.stop()
    line = _line(name) if shown else None
    if line is not None:
        _shown.append(line)
        line.start()
    try:
        yield
    finally:
        if line is not None:
            line.stop()
            _shown.remove(line)
        if outer is not None:
            outer.start()


def _line(name: str) -> Progress:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("intarsia: {task.description}"), TimeElapsedColumn())
    line = Progress(*columns, console=Console(stderr=True), transient=True)
    line.add_task(name, total=None)
    return line


def _is_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


@contextmanager
def torch_logs_kept() -> Iterator[None]:
    """What torch logs meanwhile goes to `intarsia.torch` at DEBUG, unless TORCH_LOGS asks for it.

    An export that fails logs a traceback of some forty lines; the error that is raised says the same.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return

    def kept(record: logging.LogRecord) -> bool:
        TORCH_LOG.debug("%s: %s", record.name, record.getMessage())
        return False

    # torch gives handlers to many of its loggers, not to the root of them alone.
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if _is_torch(name)]
    changed = list({id(handler): handler for logger in loggers for handler in logger.handlers}.values())
    for handler in changed:
        handler.addFilter(kept)
    try:
        yield
    finally:
        for handler in changed:
            handler.removeFilter(kept)

"""Running a script whose modules are tuned while it runs.

A second run would repeat the script's effects, and would have other module objects.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from intarsia.errors import InputError
from intarsia.options import CompileOptions
from intarsia.runtime.placed import PlacedForward
from intarsia.tuning.candidate import compiled_for
from intarsia.tuning.recorded import Recorded, new_recorded, watch


@dataclass
class Watched:
    """A module of the script: its recorded calls, its program or why it has none, and its later calls."""

    name: str
    module: nn.Module
    calls: Recorded
    handles: list[RemovableHandle] = field(default_factory=list)
    placed: PlacedForward | None = None
    reason: str | None = None
    calls_since: int = 0
    seconds_since: float = 0.0

    def __str__(self) -> str:
        before = f"{self.calls.seconds / max(1, self.calls.total) * 1e3:.4g} ms a call"
        if self.placed is None:
            return f"{self.name} stays as it is ({before}): {self.reason or 'it was not called often enough'}"
        since = f"{self.seconds_since / max(1, self.calls_since) * 1e3:.4g} ms in {self.calls_since} calls"
        engines = dict.fromkeys(e for program in self.placed.programs for e in program.plan.engines)
        return f"{self.name} took {before}, takes {since}, on {', '.join(engines)}"


class ScriptTuner:
    """Watches the outermost modules that run. After some calls, each is compiled and its forward replaced.

    If a module cannot be compiled, the modules that it calls are watched instead.
    """

    def __init__(self, after: int, options: Mapping[str, Any], *, only_if_faster: bool = True) -> None:
        if after < 1:
            raise InputError(f"after={after}: a module must be called at least once before it is compiled")
        self.watched: dict[nn.Module, Watched] = {}
        self._after, self._only_if_faster = after, only_if_faster
        self._options = CompileOptions.checked(options, "tune", preset=["fallback"])
        self._running, self._lock = threading.local(), threading.RLock()
        self._busy = False  # the compiler runs modules, too, which are not calls of the script

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the `with` block, modules are watched and tuned. After it, all are restored."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for item in self.watched.values():
                for handle in item.handles:
                    handle.remove()
                if item.placed is not None:
                    item.placed.take_out()

    def _stack(self) -> list[tuple[nn.Module, float]]:
        stack: list[tuple[nn.Module, float]] = self._running.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._busy:
            return
        stack, item = self._stack(), self.watched.get(module)
        if item is not None and item.placed is None and item.reason is None:
            with self._lock:  # not at the end of the call before, whose time is still measured then
                if item.calls.total >= self._after and item.placed is None and item.reason is None:
                    self._compile(item)
        callers = [self.watched.get(caller) for caller, _ in stack]
        if item is None and all(c is not None and c.reason is not None for c in callers):
            with self._lock:
                name = f"{type(module).__name__} {len(self.watched) + 1}"
                if stack and callers[-1] is not None:
                    paths = {part: path for path, part in stack[-1][0].named_modules()}
                    name = f"{callers[-1].name}.{paths.get(module, type(module).__name__)}"
                new = self.watched[module] = Watched(name, module, new_recorded(module))
                new.handles = watch(module, new.calls)  # from the next call on, since this one has begun
        stack.append((module, time.perf_counter()))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._busy:
            return
        stack = self._stack()
        while stack:
            popped, start = stack.pop()
            if popped is module:
                self._called(module, time.perf_counter() - start)
                return

    def _called(self, module: nn.Module, seconds: float) -> None:
        item = self.watched.get(module)
        if item is not None and item.placed is not None:
            item.calls_since += 1
            item.seconds_since += seconds

    def _compile(self, item: Watched) -> None:
        for handle in item.handles:
            handle.remove()
        item.handles, self._busy = [], True
        try:
            outcome = compiled_for(
                item.name, item.module, item.calls, self._options, only_if_faster=self._only_if_faster
            )
        finally:
            self._busy = False
        if isinstance(outcome, PlacedForward):
            item.placed = outcome
            outcome.put()
        else:
            item.reason = outcome


def run_script(script: str, args: Sequence[str], tuner: ScriptTuner) -> int:
    """Run a script as `python script.py args`, with its modules tuned; returns its exit status."""
    path = Path(script)
    if not path.is_file():
        raise InputError(f"there is no script {script!r}")
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *args], str(path.resolve().parent)
    try:
        with tuner.watching():
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[0] = argv, first
    return 0

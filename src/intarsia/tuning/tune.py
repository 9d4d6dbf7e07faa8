"""`tune`: find the modules of a program that take the time, compile them, and replace their `forward`.

The modules of a script are tuned while it runs: a second run would repeat the script's effects, and would
have other module objects.
"""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from intarsia.errors import InputError, count_text
from intarsia.options import CompileOptions
from intarsia.runtime.forwards import PlacedForward
from intarsia.timing import PAUSE_S, Timing, race
from intarsia.tuning.candidate import compiled_for
from intarsia.tuning.recorded import CallTree, Recorded, Running, call_tree, held_modules, recording, watch


@dataclass(eq=False)
class Tuned:
    """The modules of a program that run compiled.

    `placed` has their programs by path, and `left` the reasons of other modules. `before` and `after` are
    times of the whole call. `restore()`, or the end of a `with` block, undoes everything.
    """

    placed: Mapping[str, PlacedForward]
    left: Mapping[str, str]
    shares: Mapping[str, float] = field(default_factory=dict)  # of the call's time, by path, before
    before: Timing | None = None
    after: Timing | None = None
    notes: Sequence[str] = ()

    @property
    def speedup(self) -> float:
        """How many times faster the whole call is; 1 if it was not measured."""
        return self.before.median / self.after.median if self.before and self.after else 1.0

    def restore(self) -> None:
        """Put the original forward of every module back, and release the compiled programs."""
        for placed in self.placed.values():
            placed.take_out()
        self.placed = {}

    def enable(self, on: bool = True) -> None:
        """Use the compiled programs, or, with `on=False`, the original forward."""
        for placed in self.placed.values():
            placed.enable(on)

    def __enter__(self) -> Tuned:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def __str__(self) -> str:
        head = f"compiled modules: {len(self.placed)}"
        if self.before and self.after:
            head += (
                f"; the whole call took {self.before.median * 1e3:.4g} ms and takes"
                f" {self.after.median * 1e3:.4g} ms ({self.speedup:.2f}x)"
            )
        lines = [head]
        for path, placed in self.placed.items():
            engines = dict.fromkeys(e for program in placed.programs for e in program.plan.engines)
            share = f", {self.shares[path]:.0%} of the time" if path in self.shares else ""
            lines.append(
                f"  {path}: {count_text(len(placed.programs), 'program')} on {', '.join(engines)}{share}"
            )
        lines += [f"  {path} stays as it is: {reason}" for path, reason in self.left.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def tune(
    target: Any,
    call: Callable[[], object],
    *,
    least_share: float = 0.05,
    only_if_faster: bool = True,
    rounds: int = 5,
    **options: Any,
) -> Tuned:
    """Speed up a program that you did not write: `intarsia.tune(pipe, lambda: pipe(prompt))`.

    The modules that take most of the time are compiled for the recorded calls, compared on them, and their
    `forward` is replaced. Sizes that differ between calls may vary. If a module cannot be compiled, the
    modules inside it are tried. `restore()` undoes everything.

    Args:
        target: an object that holds modules: a pipeline, a service, a model.
        call: runs your code. It is called about ten times.
        least_share: modules that take less than this share of the call are not compiled.
        only_if_faster: keep a program only if it is faster, both alone and in the whole call.
        rounds: how often the whole call is timed before and after.
        options: those of `intarsia.compile`.

    >>> import torch
    >>> class Service:
    ...     def __init__(self):
    ...         self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    ...     def answer(self, x):
    ...         with torch.no_grad():
    ...             return self.model(x).argmax(-1)
    >>> service = Service()
    >>> call = lambda: service.answer(torch.ones(2, 64))
    >>> tuned = tune(service, call, only_if_faster=False, least_share=0)
    >>> list(tuned.placed)
    ['model']
    >>> tuned.restore()
    """
    if not callable(call):
        raise InputError(f"tune(target, call): call must be a function, not a {type(call).__name__}")
    if not isinstance(least_share, int | float) or not least_share >= 0:
        raise InputError(f"least_share={least_share!r}; give a share of the time, such as 0.05")
    if not isinstance(rounds, int) or rounds < 1:
        raise InputError(f"rounds={rounds!r}; give the number of rounds to time, 1 or more")
    compile_options = CompileOptions.checked(options, "tune", preset=["fallback"])
    modules = held_modules(target)
    if not modules:
        raise InputError(f"tune found no nn.Module in this {type(target).__name__}")
    paths = {module: path for path, module in modules.items()}
    call()  # work that is done only at the first call does not count
    tree = call_tree(modules.values(), call)
    if not tree.callers:
        raise InputError(f"the call used none of the {len(modules)} modules in this {type(target).__name__}")
    placed, left = _search(paths, tree, call, least_share, compile_options, only_if_faster)
    shares = {path: tree.share(one.module) for path, one in placed.items()}
    tuned = Tuned(placed, left, shares)
    for one in placed.values():
        one.put()
    try:
        if placed:
            _measure(tuned, call, rounds, only_if_faster)
    except BaseException:  # from the user's call: without a result, nothing could restore the modules
        tuned.restore()
        raise
    return tuned


def _search(
    paths: Mapping[nn.Module, str],
    tree: CallTree,
    call: Callable[[], object],
    least_share: float,
    options: CompileOptions,
    only_if_faster: bool,
) -> tuple[dict[str, PlacedForward], dict[str, str]]:
    """Compile the outermost modules; where one cannot be compiled, try the modules inside it."""
    placed: dict[str, PlacedForward] = {}
    left: dict[str, str] = {}
    seen: set[nn.Module] = set()
    frontier = tree.called_by(None)
    for module in frontier:
        if tree.share(module) < least_share:
            left[paths[module]] = f"it takes {tree.share(module):.1%} of the time"
    while frontier:
        candidates = [m for m in frontier if m not in seen and tree.share(m) >= least_share]
        seen.update(frontier)
        calls = _recorded(candidates, call)
        frontier = []
        for module in candidates:
            outcome = compiled_for(
                paths[module], module, calls[module], options, only_if_faster=only_if_faster
            )
            if isinstance(outcome, PlacedForward):
                placed[paths[module]] = outcome
                seen.update(module.modules())
            else:
                left[paths[module]] = outcome
                frontier += tree.called_by(module)
    return placed, _without_repeats(left)


def _without_repeats(left: Mapping[str, str]) -> dict[str, str]:
    """The reasons, without those of modules inside one with the same reason."""
    return {
        path: reason
        for path, reason in left.items()
        if not any(path.startswith(f"{outer}.") and reason == other for outer, other in left.items())
    }


def _recorded(modules: list[nn.Module], call: Callable[[], object]) -> dict[nn.Module, Recorded]:
    with ExitStack() as stack:
        calls = {module: stack.enter_context(recording(module)) for module in modules}
        if modules:
            call()
    return calls


def _measure(tuned: Tuned, call: Callable[[], object], rounds: int, only_if_faster: bool) -> None:
    """Time the whole call in turns, with the original forwards and with the programs."""

    def timed(on: bool) -> Callable[[], object]:
        def run() -> object:
            tuned.enable(on)
            return call()

        return run

    times = race(
        {"before": timed(False), "after": timed(True)}, rounds=rounds, warmup=1, budget_s=120, pause_s=PAUSE_S
    )
    tuned.enable()
    tuned.before, tuned.after = times["before"], times["after"]
    if only_if_faster and tuned.speedup < 1:
        note = f"everything stays as it is: compiled, the whole call is slower ({tuned.speedup:.2f}x)"
        tuned.restore()
        tuned.notes = [*tuned.notes, note]


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
        self._running, self._lock = Running(), threading.RLock()
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

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._busy:
            return
        item = self.watched.get(module)
        if item is not None and item.placed is None and item.reason is None:
            with self._lock:  # not at the end of the call before, whose time is still measured then
                if item.calls.total >= self._after and item.placed is None and item.reason is None:
                    self._compile(item)
        outer = self._running.begin(module)
        callers = [self.watched.get(caller) for caller in outer]
        if item is None and all(c is not None and c.reason is not None for c in callers):
            with self._lock:
                name = f"{type(module).__name__} {len(self.watched) + 1}"
                if outer and callers[-1] is not None:
                    paths = {part: path for path, part in outer[-1].named_modules()}
                    name = f"{callers[-1].name}.{paths.get(module, type(module).__name__)}"
                new = self.watched[module] = Watched(name, module, Recorded(module))
                new.handles = watch(module, new.calls)  # from the next call on, since this one has begun

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._busy:
            return
        seconds, item = self._running.end(module), self.watched.get(module)
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

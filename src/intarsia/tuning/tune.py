"""`tune`: find the modules of a program that take the time, compile them, and replace their `forward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from intarsia.errors import InputError, count_text
from intarsia.options import CompileOptions
from intarsia.runtime.placed import PlacedForward
from intarsia.timing import PAUSE_S, Timing, race
from intarsia.tuning.candidate import compiled_for
from intarsia.tuning.holders import CallTree, call_tree, held_modules
from intarsia.tuning.recorded import Recorded, new_recorded, watch


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
    if not modules:
        return {}
    calls = {module: new_recorded(module) for module in modules}
    handles = [handle for module, recorded in calls.items() for handle in watch(module, recorded)]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
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

"""The function that Dynamo calls with every graph: it compiles one for the weights and sizes of its calls.

Compiling with new weights takes seconds, so a weight that changed four times becomes an input. Several
modules of a class share one graph, so programs are stored by their weights.
"""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from intarsia.backend.dynamo_graph import DynamoInput, Kind, apart_from_dynamo, inputs_of
from intarsia.backend.program import (
    NOTE,
    Autocast,
    Program,
    autocast_now,
    example_of,
    freeze,
    needs_gradients,
    without_autocast,
)
from intarsia.compiler.entry import compile_whole
from intarsia.errors import (
    CaptureError,
    InputError,
    IntarsiaError,
    InternalError,
    LoweringError,
    StaleWeightsError,
    UnknownNameError,
    first_line,
    some_of,
)
from intarsia.graph.segment import PYTORCH
from intarsia.options import CALL_ARGUMENTS, CompileOptions
from intarsia.runtime.compiled import Compiled

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_ALTERNATIVES = {
    "reduce-overhead": "on a GPU the whole graph is one CUDA graph unless options={'cuda_graphs': False}",
    "max-autotune": "options={'partition': intarsia.Measured()} measures which engine is fastest",
    "max-autotune-no-cudagraphs": "options={'partition': intarsia.Measured(), 'cuda_graphs': False} does it",
    "lite": "options={'engines': 'pytorch'} leaves everything to PyTorch",
}
_CHANGES = 4  # a weight that has changed this often becomes an input
_MOST_PROGRAMS = 64  # of one graph, which modules of one class share
_OTHER_CALL = (InputError, StaleWeightsError)  # raised by a program that does not fit a call


def intarsia_backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: `torch.compile(model, backend="intarsia", options={...})`.

    `options` are those of `intarsia.compile`. Parameters and buffers are constants of the program, which is
    compiled again when they change. Sizes that Dynamo made symbolic vary within the ranges of its guards. A
    graph that needs gradients, or cannot be compiled, runs as captured. A warning says so once, and
    `intarsia.backend.reports()` has a report for each graph.
    """
    compile_options = checked_options(mode, options)
    report = new_report(_where(module))
    dynamo_inputs = inputs_of(module, inputs)
    call = GraphCall(module, dynamo_inputs, compile_options, autocast_now(), report)
    reason = _left_to_pytorch(module, inputs)
    if reason is None:
        call.prepare(inputs)
    else:
        call.leave(reason)
    return call


def _left_to_pytorch(module: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    if needs_gradients(module, inputs):
        return NOTE
    if any(isinstance(x, torch._subclasses.FakeTensor) for x in inputs):
        return "its inputs have no values during compilation"
    return None


def _where(module: fx.GraphModule) -> str:
    """The line of the caller's code with the graph's first operation."""
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            frames = _FRAME.findall(str(node.meta.get("stack_trace", "")))
            own = [frame for frame in frames if "/torch/" not in frame[0]]
            if frames:
                file, line, name = (own or frames)[-1]
                return f"{file}:{line} (in {name})"
    return "an unknown place"


def checked_options(mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
    """The options, checked; InputError, with near names, for one that `compile` does not have.

    >>> checked_options(None, {"engine": "openvino"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    intarsia.errors.OptionError: ... has no option 'engine'; did you mean 'engines'?
    """
    if mode not in (None, "default"):
        alternative = f": {_ALTERNATIVES[mode]}" if mode in _ALTERNATIVES else ""
        raise InputError(f"mode={mode!r} is a setting of TorchInductor; pass options= instead{alternative}")
    for name in CALL_ARGUMENTS:  # Dynamo provides the graph, its inputs and the sizes that vary
        if name in (options or {}):
            raise InputError(
                f"option {name!r} comes from Dynamo; set the sizes that vary with torch.compile(dynamic=...)"
                " or torch._dynamo.mark_dynamic"
            )
    return CompileOptions.checked(options or {}, 'torch.compile(backend="intarsia")')


class GraphCall:
    """A graph of Dynamo, called with all its inputs, including the weights.

    The weights are constants of its programs. A call checks whether they are the same tensors, at the same
    memory addresses, with the same contents (`Freshness`). If not, the graph is compiled again, and a weight
    that keeps changing becomes an input. Calls without a program run the graph as captured.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        kinds: Sequence[DynamoInput],
        options: CompileOptions,
        autocast: Autocast,
        report: GraphReport,
    ) -> None:
        self._module, self._kinds, self._options = module, tuple(kinds), options
        self._autocast, self._report = autocast, report
        self._weights = [i for i, item in enumerate(kinds) if item.kind is Kind.WEIGHT]
        self._programs: tuple[Program, ...] = ()
        self._last: Program | None = None
        self._newest: Program | None = None
        self._frozen: dict[int, weakref.ref[torch.Tensor]] = {}  # the weights of the newest program
        self._changes: dict[int, int] = {}
        self._live: frozenset[int] = frozenset()  # weights that are inputs because they keep changing
        self._resized = 0
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        program = self._last
        if program is not None and program.fits(args):
            try:
                return program(args)
            except _OTHER_CALL:
                pass
        return self._otherwise(args)

    def prepare(self, args: Sequence[Any]) -> None:
        """Compile for the first call. Raises an error if an option of the user's cannot be satisfied."""
        with self._lock:
            try:
                self._compile_for_names(args)
            except (CaptureError, LoweringError, InternalError) as error:
                if self._options.is_strict:
                    if isinstance(error, InternalError) and error.__cause__ is not None:
                        raise error.__cause__ from None
                    raise
                self.leave(first_line(error))
            except IntarsiaError:
                raise
            except Exception as error:  # the graph still runs in PyTorch
                self.leave(f"{type(error).__name__}: {error}")

    def leave(self, reason: str) -> None:
        """Run the graph as captured from now on if no program fits a call."""
        self._report.reason = reason
        warnings.warn(f"this graph runs in PyTorch ({self._report.where}): {reason}", stacklevel=3)

    def _otherwise(self, args: Sequence[Any]) -> Any:
        """Answer a call that does not fit the last program."""
        with self._lock:
            for program in self._programs:
                if program is self._last or not program.fits(args):
                    continue
                try:
                    answer = program(args)
                except _OTHER_CALL:
                    continue
                self._last = program
                return answer
            if self._report.reason is None:
                self._count_changes(args)
            if self._report.reason is None:
                self.prepare(args)
            newest = self._last
            if newest is not None and newest.fits(args):
                try:
                    return newest(args)
                except _OTHER_CALL as error:
                    if self._report.reason is None:
                        self.leave(str(error))
        return self._module(*args)

    def _count_changes(self, args: Sequence[Any]) -> None:
        """Count which weights changed. Those that keep changing become inputs; all counts have a limit."""
        others = [i for i, weight in self._frozen.items() if weight() is not args[i]]
        changed = others if self._newest is None else self._newest.changed(args)
        if not changed:
            self._resized += 1
            if self._resized >= _recompile_limit():
                self.leave(f"it was compiled {self._resized} times for sizes or numbers that did not hold")
        elif self._report.programs >= _MOST_PROGRAMS:
            self.leave(f"it was compiled {_MOST_PROGRAMS} times, with other weights each time")
        elif len(others) < max(2, len(self._frozen)):  # if all differ, they are those of another module
            for i in changed:
                self._changes[i] = self._changes.get(i, 0) + 1
            often = {i for i, times in self._changes.items() if times >= _CHANGES}
            if often - self._live:
                names = some_of([self._kinds[i].source for i in sorted(often - self._live)])
                self._report.note(f"{names} changed {_CHANGES} times: no longer constants of the program")
                self._live |= often
                self._programs, self._last = (), None
        stale = [p for p in self._programs if changed and p.fits(args)]
        self._programs = tuple(p for p in self._programs if p not in stale)
        self._newest = None if self._newest in stale else self._newest

    def _compile_for_names(self, args: Sequence[Any]) -> None:
        """Compile without the names in the options that this graph does not have; another may have them."""
        while True:
            try:
                return self._compile(args)
            except UnknownNameError as error:
                options = _without_name(self._options, error)
                if options is None:
                    raise
                self._options = options
                self._report.note(f"not in this graph: {error}")

    def _compile(self, args: Sequence[Any]) -> None:
        uncounted = {i for i in self._weights if args[i].is_inference()} - self._live
        if uncounted:
            self._live |= uncounted
            names = some_of([self._kinds[i].source for i in sorted(uncounted)])
            self._report.note(
                f"{names}: created in inference mode, where torch does not count changes, so not a constant"
            )
        frozen = freeze(self._module, self._kinds, args, self._live, self._autocast)
        with (
            apart_from_dynamo(),
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(self._autocast),
        ):
            compiled = compile_whole(
                self._options,
                frozen.module,
                example_of(frozen, args),
                dynamic_shapes=frozen.dynamic_shapes,
            )
        program = Program(compiled, frozen, self._autocast, args, weakref.WeakMethod(self.drop))
        self._programs, self._last, self._newest = (*self._programs, program), program, program
        self._frozen = {i: weakref.ref(args[i]) for i in frozen.weights}
        self._tell(compiled, frozen.dynamic_shapes is not None)

    def _tell(self, compiled: Compiled, sizes_vary: bool) -> None:
        plan, report = compiled.plan, self._report
        report.nodes, report.engines, report.plan = len(plan.nodes), plan.engines, str(plan)
        report.on_engines = sum(len(s) for s in plan.segments if s.engine != PYTORCH)
        report.programs += 1
        report.sizes_vary = sizes_vary
        report.note(*compiled.notes)

    def drop(self, program: Program) -> None:
        """Drop a program whose weights were freed."""
        self._programs = tuple(p for p in self._programs if p is not program)
        self._last = None if self._last is program else self._last
        self._newest = None if self._newest is program else self._newest


def _recompile_limit() -> int:
    """The number of times that Dynamo compiles one piece of code."""
    return int(getattr(torch._dynamo.config, "recompile_limit", 8))


def _without_name(options: CompileOptions, error: UnknownNameError) -> CompileOptions | None:
    """The options without a name that one graph does not have; None if it cannot be removed."""
    names = getattr(options.limits, error.option)
    if isinstance(names, str) or not isinstance(names, Sequence) or error.name not in names:
        return None
    others: Any = [name for name in names if name is not error.name and name != error.name]
    return replace(options, limits=replace(options.limits, **{error.option: others}))


# A report for each graph that Dynamo passed to the backend.


_MOST = 1000  # graphs


@dataclass
class GraphReport:
    """The report of one graph: where it begins in the user's code, and what runs on engines.

    `nodes` is the number of operators after lowering, and `on_engines` the number of those on engines. For a
    graph that runs as captured, both are 0 and `reason` says why. `programs` is the number of compiles: one
    for each set of weights, and more if sizes varied outside Dynamo's ranges.
    """

    number: int
    where: str
    nodes: int = field(default=0, init=False)
    on_engines: int = field(default=0, init=False)
    engines: tuple[str, ...] = field(default=(), init=False)
    programs: int = field(default=0, init=False)
    sizes_vary: bool = field(default=False, init=False)
    reason: str | None = field(default=None, init=False)
    plan: str = field(default="", init=False)
    notes: tuple[str, ...] = field(default=(), init=False)

    @property
    def share(self) -> float:
        """The share of the nodes that run on engines."""
        return self.on_engines / self.nodes if self.nodes else 0.0

    def note(self, *notes: str) -> None:
        """Add notes that it does not have."""
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))

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
    reports = tuple(map(copy, _reports))  # copies, which later compiles do not change
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

"""One CUDA graph for a whole compiled module: its kernels are recorded once and launched together.

Launching a kernel from Python costs more than most kernels take. A graph reads and writes the memory that it
was recorded with, so a call copies its inputs there, launches the graph, and copies the results out:

    caller's stream   ──copy inputs──▶ launch graph ──copy results──▶ fresh tensors
    graph's memory       static inputs ──▶ kernels ──▶ static results
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import fx

from intarsia.compare import disagreement
from intarsia.errors import EngineError, error_text
from intarsia.graph.nodes import is_compute, is_control_flow, is_ordered, whereabouts
from intarsia.runtime.compiled import Compiled, Run

Results = Literal["fresh", "static"]
Result = TypeVar("Result")

SHAPES = 512  # graphs a module may have, one for each set of input shapes
_SHARE = 8  # one part in so many of the GPU's memory is for inputs and results of graphs
_FEW = 4  # tensors that are copied one by one: the kernel for many takes 8 us, a copy of one 2
_WARMUPS = 2  # runs before recording: libraries set themselves up and choose their kernels


def not_capturable(graph: fx.Graph, engines_capturable: bool) -> str | None:
    """Why a graph cannot be recorded, as far as it shows before trying; None if nothing speaks against it."""
    if not engines_capturable:
        return "an engine of the plan launches its kernels on a stream of its own"
    devices: dict[torch.device, fx.Node] = {}
    for node in graph.nodes:
        if not (is_compute(node) or node.op == "placeholder"):
            continue
        if node.op != "placeholder" and is_control_flow(node):
            return f"{whereabouts(node)} decides on values what runs"
        if depends_on_values(node):
            return f"the sizes of {whereabouts(node)} depend on values"
        made = node.meta.get("val")
        for value in made if isinstance(made, list | tuple) else [made]:
            if isinstance(value, torch.Tensor):
                devices.setdefault(value.device, node)
            elif node.op != "placeholder" and value is not None:
                return f"{whereabouts(node)} reads a value back from the GPU"
    for device, node in devices.items():
        if device.type != "cuda":
            return f"{whereabouts(node)} is on {device}"
    if len(devices) > 1:
        return f"it runs on {' and '.join(map(str, devices))}"
    return None if devices else "nothing of it runs on a GPU"


def depends_on_values(node: fx.Node) -> bool:
    """Whether the sizes of what a node makes are known only once it has run.

    An operator's tag says what it may do: `index` makes tensors of any size from booleans, and of a known
    size from integers. What this node does, its metadata say.
    """
    made = node.meta.get("val")
    if made is None:
        return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
    values = made if isinstance(made, list | tuple) else [made]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes)


def use_cuda_graphs(
    compiled: Compiled,
    graph: fx.Graph,
    *,
    capturable: bool,
    results: Results,
    examples: Sequence[Sequence[Any]],
) -> None:
    """Let a compiled module run as one CUDA graph; where that cannot be, a note of the module says why.

    It is recorded for the examples now: for the first with all checks, for the largest sizes so that the
    memory that graphs share is there when calls come.
    """
    programs = [_innermost(step.program) for step in compiled.inlay.steps]
    reason = not_capturable(graph, capturable) or _waits(programs)
    if reason is not None:
        compiled.note(f"not run as a CUDA graph: {reason}")
        return
    shared = any(getattr(program, "own_workspace", False) for program in programs)
    graphs = CudaGraphs(compiled.inlay.results, graph, results, shared, compiled.weights.check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told by the notes
        for example in examples:
            graphs.record(example)
    compiled.note(*graphs.notes)
    compiled.run_by(graphs, checks_weights=True)


def _innermost(program: Any) -> Any:
    """The engine's own program, inside those that answer in its place where it cannot."""
    while hasattr(program, "program"):
        program = program.program
    return program


def _waits(programs: Sequence[Any]) -> str | None:
    """Why a program must wait for the GPU at every call; None if none does."""
    for program in programs:
        read = getattr(program, "waits_for", ())
        if read:
            return f"an engine reads back from the GPU whether {read[0]} (guards=False leaves that out)"
    return None


@dataclass(frozen=True)
class _Recorded:
    """A graph with the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    device: torch.device
    inputs: list[tuple[int, torch.Tensor]]  # which input of a call each is a copy of
    made: list[torch.Tensor]  # results that the graph writes
    results: list[tuple[int | None, int | None, Any]]  # an input's place, a place in `made`, or a plain value

    @classmethod
    def of(cls, graph: torch.cuda.CUDAGraph, inputs: list[Any], results: list[Any]) -> _Recorded:
        read = [(place, x) for place, x in enumerate(inputs) if _is_tensor(x)]
        # An input that is returned is the caller's tensor, not the graph's copy of it.
        own = {id(x): place for place, x in enumerate(inputs)}
        made = list({id(x): x for x in results if _is_tensor(x) and id(x) not in own}.values())
        places = {id(x): place for place, x in enumerate(made)}
        returned = [(own.get(id(x)), places.get(id(x)), None if _is_tensor(x) else x) for x in results]
        return cls(graph, read[0][1].device, read, made, returned)

    @property
    def bytes(self) -> int:
        """The memory that the graph keeps while others run: its inputs and results."""
        return sum(x.nbytes for x in (*self.made, *(x for _, x in self.inputs)))


class CudaGraphs:
    """Calls `run` through a CUDA graph for each set of shapes; what cannot be recorded runs as before.

    To record a call takes about as long as to launch its kernels one by one, so a set of shapes is recorded
    at its first call. All graphs of a module share one pool of memory, since they run one after another; each
    keeps its inputs and results. The graph that was used least recently goes where there are too many.
    Calls from several threads take turns; a call on another stream waits for the one before. With
    `results="static"` a call returns the graph's own memory, which the next call overwrites.
    Where an engine works in memory of its own (`shared_workspace`), a graph and a plain run write to the
    same: those take turns too, and nobody else may record them. What the host has to do for every call anyway
    (`meanwhile`: look whether weights changed) is done while the GPU works; it may raise.
    """

    def __init__(
        self,
        run: Run,
        graph: fx.Graph,
        results: Results = "fresh",
        shared_workspace: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._meanwhile = meanwhile
        self._shared_workspace = shared_workspace
        self.results = results
        self._static = results == "static"
        self._random = any(node.op == "call_function" and is_ordered(node) for node in graph.nodes)
        self._recorded: dict[Any, _Recorded | None] = {}  # the one used last comes last
        self._bytes = 0  # of inputs and results of all graphs
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None  # where the last launch went
        self._recording: torch.cuda.Stream | None = None  # where graphs are recorded, and nothing else runs
        self._lock = threading.Lock()
        self.notes: list[str] = []

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        # While the caller records a graph of its own, our kernels belong into that one.
        if torch.cuda.is_current_stream_capturing():
            self._meanwhile()
            return self._run_in_turn(inputs) if self._shared_workspace else self._run(inputs)
        with self._lock, torch.no_grad():
            key = _key(inputs)
            recorded = self._recorded.get(key)
            if recorded is None:
                recorded = self._record_if_possible(key, inputs)
            elif len(self._recorded) > 1:
                self._recorded[key] = self._recorded.pop(key)
            if recorded is not None:
                if torch.cuda.current_device() == recorded.device.index:  # entering a device costs 5 us
                    return self._launch(recorded, inputs)
                with torch.cuda.device(recorded.device):
                    return self._launch(recorded, inputs)
        self._meanwhile()
        return self._run_in_turn(inputs) if self._shared_workspace else self._run(inputs)

    def _run_in_turn(self, inputs: Sequence[Any]) -> list[Any]:
        if torch.cuda.is_current_stream_capturing():
            raise EngineError(
                "an engine of this module works in memory of its own, so that its kernels cannot be recorded "
                "into another CUDA graph; compile it with cuda_graphs=False and engines that torch runs"
            )
        with self._lock:
            self._wait_for_last()
            return self._run(inputs)

    def _wait_for_last(self) -> None:
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def record(self, inputs: Sequence[Any]) -> None:
        """Record a graph for the shapes of these inputs now, if it can be."""
        with self._lock, torch.no_grad():
            self._record_if_possible(_key(inputs), inputs)

    def _record_if_possible(self, key: Any, inputs: Sequence[Any]) -> _Recorded | None:
        if key in self._recorded:  # it was tried
            return None
        recorded: _Recorded | None = None
        try:
            recorded = self._record(inputs)
        except Exception as error:  # what cannot be recorded runs as it did before
            self._tell(f"not run as a CUDA graph: {error_text(error)}")
        self._recorded[key] = recorded
        if recorded is not None:
            self._bytes += recorded.bytes
            self._make_room(recorded.device)
        return recorded

    def _make_room(self, device: torch.device) -> None:
        """Release the graphs that were used least recently, until the others are few and small enough."""
        most = torch.cuda.get_device_properties(device).total_memory // _SHARE
        if len(self._recorded) > SHAPES or self._bytes > most:
            torch.cuda.synchronize(device)  # one that still runs reads its inputs
        while len(self._recorded) > 1 and (len(self._recorded) > SHAPES or self._bytes > most):
            oldest = self._recorded.pop(next(iter(self._recorded)))
            self._bytes -= 0 if oldest is None else oldest.bytes

    def _tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            warnings.warn(note, stacklevel=5)

    def _record(self, inputs: Sequence[Any]) -> _Recorded:
        device = next(x.device for x in inputs if isinstance(x, torch.Tensor))
        self._wait_for_last()
        static = [_same_layout(x).copy_(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        with torch.cuda.device(device):
            if any(self._recorded.values()):  # libraries are set up, and the first graph was checked
                try:
                    return _Recorded.of(*self._captured(static, device))
                except RuntimeError:  # a kernel that this shape alone needs may have to be loaded first
                    torch.cuda.synchronize(device)
            state = torch.cuda.get_rng_state(device)
            expected = self._warmed_up(static, device)
            graph, static, results = self._captured(static, device)
            torch.cuda.set_rng_state(state, device)
            if not self._random:
                _check(graph, results, expected)
        return _Recorded.of(graph, static, results)

    def _warmed_up(self, inputs: list[Any], device: torch.device) -> list[Any]:
        """What a plain run gives, after which libraries are set up and have chosen their kernels."""
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                results = self._run(inputs)
        current.wait_stream(side)
        torch.cuda.synchronize(device)
        return results

    def _captured(
        self, inputs: list[Any], device: torch.device
    ) -> tuple[torch.cuda.CUDAGraph, list[Any], list[Any]]:
        """A graph of one run, and what it reads and writes."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # Products keep working memory for each stream. On one where none ran yet it is taken from the
            # graph's own memory; another's could be given back while the graph still writes to it, as
            # torch.compile does for all streams whenever it records a graph.
            self._recording = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        assert self._recording is not None
        graph, results = captured(lambda: self._run(inputs), self._recording, self._pool)
        return graph, inputs, results

    def _launch(self, recorded: _Recorded, inputs: Sequence[Any]) -> list[Any]:
        self._wait_for_last()
        _copy([to for _, to in recorded.inputs], [inputs[place] for place, _ in recorded.inputs])
        recorded.graph.replay()
        made = recorded.made
        if not self._static:
            made = [_same_layout(x) for x in made]
            _copy(made, recorded.made)
        self._meanwhile()
        return [
            made[place] if place is not None else plain if given is None else inputs[given]
            for given, place, plain in recorded.results
        ]


def captured(
    run: Callable[[], Result], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `run` launches, and what it returns; its memory is the pool's.

    `torch.cuda.graph` would also empty torch's cache of memory, which takes 50 ms.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = run()
            finally:
                graph.capture_end()
        except Exception:
            # A capture that fails leaves torch's generator inside it, so that the next random number of
            # anybody would be an error (torch 2.11). One that succeeds takes it out.
            torch.cuda.synchronize()
            clean, something = torch.cuda.CUDAGraph(), torch.empty((), device="cuda")
            clean.capture_begin()
            something.zero_()
            clean.capture_end()
            raise
    return graph, results


def _check(graph: torch.cuda.CUDAGraph, results: list[Any], expected: list[Any]) -> None:
    """A graph that answers differently from the run it recorded is not used."""
    graph.replay()
    pairs = [pair for pair in zip(results, expected, strict=True) if _is_tensor(pair[0])]
    wrong = disagreement([answer for answer, _ in pairs], [truth for _, truth in pairs])
    if wrong is not None:
        raise RuntimeError(f"replayed, {wrong}")


def _key(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(x.shape, x.stride()) if isinstance(x, torch.Tensor) else (type(x), x) for x in inputs])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same sizes and, unless it overlaps itself, the same strides."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


def _copy(to: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if len(to) <= _FEW:
        for copy, tensor in zip(to, tensors, strict=True):
            copy.copy_(tensor)
    else:
        torch._foreach_copy_(to, tensors)  # one kernel for all of them

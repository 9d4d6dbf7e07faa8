"""One CUDA graph for a compiled module: its kernels are recorded once and launched together.

Launching a kernel from Python takes longer than most kernels run. A graph reads and writes the memory that it
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
from intarsia.engines.triton_kernels.operators import has_triton
from intarsia.errors import EngineError, error_text
from intarsia.graph.nodes import is_compute, is_control_flow, is_ordered, whereabouts
from intarsia.runtime.compiled import Compiled, Run

Results = Literal["fresh", "static"]
Result = TypeVar("Result")

SHAPES = 512  # the largest number of graphs of a module, one for each set of input shapes
_SHARE = 8  # inputs and results of graphs may take this part of the GPU's memory
_FEW = 4  # up to this number, tensors are copied one by one: 2 us each, or 8 us for a kernel that copies many
_LARGE = 2**22  # bytes of a result; below, a copy takes as long as its launch
_WARMUPS = 2  # runs before recording, in which libraries initialize themselves and choose kernels


def not_capturable(graph: fx.Graph, engines_capturable: bool) -> str | None:
    """Why a graph cannot be recorded, as far as its nodes show; None if it may be."""
    if not engines_capturable:
        return "an engine of the plan launches its kernels on a stream of its own"
    devices: dict[torch.device, fx.Node] = {}
    for node in graph.nodes:
        if not (is_compute(node) or node.op == "placeholder"):
            continue
        if node.op != "placeholder" and is_control_flow(node):
            return f"{whereabouts(node)} decides by values what runs"
        if depends_on_values(node):
            return f"the sizes of {whereabouts(node)} depend on values"
        result = node.meta.get("val")
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, torch.Tensor):
                devices.setdefault(value.device, node)
            elif node.op != "placeholder" and value is not None:
                return f"{whereabouts(node)} reads a value back from the GPU"
    for device, node in devices.items():
        if device.type != "cuda":
            return f"{whereabouts(node)} is on {device}"
    if len(devices) > 1:
        return f"it runs on {' and '.join(map(str, devices))}"
    return None if devices else "no part of it runs on a GPU"


def depends_on_values(node: fx.Node) -> bool:
    """Whether the sizes of a node's results are known only after it has run.

    The operator's tag does not say so: `index` returns a tensor of any size for booleans, and of a known size
    for integers. The node's metadata does.
    """
    result = node.meta.get("val")
    if result is None:
        return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
    values = result if isinstance(result, list | tuple) else [result]
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
    """Run a compiled module as one CUDA graph. If that is not possible, a note of the module says why.

    Graphs are recorded for the examples at once: for the first one with all checks, and for the largest
    sizes, so that the memory that graphs share is allocated before calls.
    """
    programs = [_innermost(step.program) for step in compiled.inlay.steps]
    reason = not_capturable(graph, capturable) or _waits(programs)
    if reason is not None:
        compiled.note(f"not run as a CUDA graph: {reason}")
        return
    shared = any(getattr(program, "own_workspace", False) for program in programs)
    graphs = CudaGraphs(compiled.inlay.results, graph, results, shared, compiled.weights.check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes say it
        for example in examples:
            graphs.record(example)
    compiled.note(*graphs.notes)
    compiled.run_by(graphs, checks_weights=True)


def _innermost(program: Any) -> Any:
    """The engine's own program, inside those that replace it where it fails."""
    while hasattr(program, "program"):
        program = program.program
    return program


def _waits(programs: Sequence[Any]) -> str | None:
    """Why a program must wait for the GPU at every call; None if none has to."""
    for program in programs:
        read = getattr(program, "waits_for", ())
        if read:
            return f"an engine reads back from the GPU whether {read[0]} (guards=False leaves that out)"
    return None


@dataclass(frozen=True)
class _Recorded:
    """A graph, and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    device: torch.device
    inputs: list[tuple[int, torch.Tensor]]  # the place of an input in a call, and the graph's copy of it
    written: list[torch.Tensor]  # the results that the graph writes
    results: list[tuple[int | None, int | None, Any]]  # place of an input, place in `written`, or plain value

    @classmethod
    def of(cls, graph: torch.cuda.CUDAGraph, inputs: list[Any], results: list[Any]) -> _Recorded:
        read = [(place, x) for place, x in enumerate(inputs) if _is_tensor(x)]
        # An input that is returned is the caller's tensor, not the graph's copy.
        own = {id(x): place for place, x in enumerate(inputs)}
        written = list({id(x): x for x in results if _is_tensor(x) and id(x) not in own}.values())
        places = {id(x): place for place, x in enumerate(written)}
        returned = [(own.get(id(x)), places.get(id(x)), None if _is_tensor(x) else x) for x in results]
        return cls(graph, read[0][1].device, read, written, returned)

    @property
    def bytes(self) -> int:
        """The memory of the graph's inputs and results, which other graphs do not use."""
        return sum(x.nbytes for x in (*self.written, *(x for _, x in self.inputs)))


class CudaGraphs:
    """Calls `run` by a CUDA graph for each set of shapes. Calls that cannot be recorded call it directly.

    Recording a call takes about as long as launching its kernels one by one, so each set of shapes is
    recorded at its first call. All graphs of a module share one pool of memory, since they run one after
    another, and each has its own inputs and results. If there are too many graphs, the least recently used
    one is released. Calls from several threads run one after another, and a call on another stream waits for
    the one before. With `results="static"`, a call returns the graph's own memory, which the next call
    overwrites. If an engine uses memory of its own (`shared_workspace`), graphs and direct runs write to it:
    they also run one after another, and cannot be recorded into a graph of the caller's. `meanwhile` is work
    of the host that every call needs, such as a check whether weights changed. It runs while the GPU
    computes, and may raise.
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
        self._recorded: dict[Any, _Recorded | None] = {}  # the most recently used one is the last
        self._bytes = 0  # of inputs and results of all graphs
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None  # the stream of the last launch
        self._recording: torch.cuda.Stream | None = None  # the stream for recording alone
        self._lock = threading.Lock()
        self.notes: list[str] = []

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        # While the caller records a graph, these kernels belong to it.
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
                "an engine of this module uses memory of its own, so its kernels cannot be recorded into"
                " another CUDA graph; compile it with cuda_graphs=False and engines that torch runs"
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
        """Record a graph for the shapes of these inputs, if it is possible."""
        with self._lock, torch.no_grad():
            self._record_if_possible(_key(inputs), inputs)

    def _record_if_possible(self, key: Any, inputs: Sequence[Any]) -> _Recorded | None:
        if key in self._recorded:  # recording was tried before
            return None
        recorded: _Recorded | None = None
        try:
            recorded = self._record(inputs)
        except Exception as error:  # the call then runs without a graph
            self._tell(f"not run as a CUDA graph: {error_text(error)}")
        self._recorded[key] = recorded
        if recorded is not None:
            self._bytes += recorded.bytes
            self._make_room(recorded.device)
        return recorded

    def _make_room(self, device: torch.device) -> None:
        """Release the least recently used graphs until the others are few and small enough."""
        most = torch.cuda.get_device_properties(device).total_memory // _SHARE
        if len(self._recorded) > SHAPES or self._bytes > most:
            torch.cuda.synchronize(device)  # a graph that still runs reads its inputs
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
            if any(self._recorded.values()):  # libraries are initialized, and the first graph was checked
                try:
                    return _Recorded.of(*self._captured(static, device))
                except RuntimeError:  # a kernel for this shape may have to be loaded first
                    torch.cuda.synchronize(device)
            state = torch.cuda.get_rng_state(device)
            expected = self._warmed_up(static, device)
            graph, static, results = self._captured(static, device)
            torch.cuda.set_rng_state(state, device)
            if not self._random:
                _check(graph, results, expected)
        return _Recorded.of(graph, static, results)

    def _warmed_up(self, inputs: list[Any], device: torch.device) -> list[Any]:
        """The results of a run without a graph, in which libraries initialize and choose kernels."""
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
        """A graph of one run, with its inputs and results."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # Matrix products have working memory for each stream. On a new stream, it is taken from the
            # graph's own memory. That of another stream could be released while the graph still uses it, as
            # torch.compile does for all streams whenever it records a graph.
            self._recording = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        assert self._recording is not None
        graph, results = captured(lambda: self._run(inputs), self._recording, self._pool)
        return graph, inputs, results

    def _launch(self, recorded: _Recorded, inputs: Sequence[Any]) -> list[Any]:
        self._wait_for_last()
        _copy([to for _, to in recorded.inputs], [inputs[place] for place, _ in recorded.inputs])
        recorded.graph.replay()
        results = recorded.written
        if not self._static:
            results = [_same_layout(x) for x in results]
            _copy(results, recorded.written)
        self._meanwhile()
        return [
            results[place] if place is not None else plain if index is None else inputs[index]
            for index, place, plain in recorded.results
        ]


def captured(
    run: Callable[[], Result], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the kernels that `run` launches, with memory of the pool, and the result of `run`.

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
            # A failed capture leaves torch's generator in capturing state, so the next random number raises
            # an error (torch 2.11). A capture that succeeds resets it.
            torch.cuda.synchronize()
            clean, something = torch.cuda.CUDAGraph(), torch.empty((), device="cuda")
            clean.capture_begin()
            something.zero_()
            clean.capture_end()
            raise
    return graph, results


def _check(graph: torch.cuda.CUDAGraph, results: list[Any], expected: list[Any]) -> None:
    """Raise RuntimeError if a graph answers differently from the run that it recorded."""
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
            _copy_one(copy, tensor)
    else:
        torch._foreach_copy_(to, tensors)  # one kernel for all of them


def _copy_one(to: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.nbytes >= _LARGE and not tensor.is_contiguous() and to.is_contiguous() and has_triton(tensor):
        from intarsia.engines.triton_kernels.copies import copy_rows, has_padded_rows

        if has_padded_rows(tensor):
            copy_rows(to, tensor)
            return
    to.copy_(tensor)

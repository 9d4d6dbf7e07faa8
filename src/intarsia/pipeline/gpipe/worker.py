"""One thread per stage for forward and backward passes, with its caller's state and share of the cores.

New threads in every step would not reuse the memory of the last step (5,600 page faults in a step of 8
micro-batches, against 600), and would create their OpenMP teams again.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.stream import get_phony
from intarsia.tracing import traced

# The device types of stages; autocast has a state for each type.
_AUTOCAST_DEVICES = ("cpu", "cuda")
SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


@dataclass(frozen=True)
class ThreadState:
    """The captured grad mode, inference mode, autocast, default device and saved-tensor hooks.

    >>> with torch.no_grad():
    ...     state = ThreadState.capture()
    >>> with state.enter():
    ...     torch.is_grad_enabled()
    False
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device
    saved_tensor_hooks: SavedTensorHooks | None

    @staticmethod
    def capture() -> ThreadState:
        """The state of the calling thread."""
        return ThreadState(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _AUTOCAST_DEVICES
            ),
            default_device=torch.get_default_device(),
            saved_tensor_hooks=saved_tensor_hooks(),
        )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Apply the state to the calling thread for a while."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind) or enabled:
                    # All threads share autocast's cache of weights. A weight cast under checkpointing has no
                    # graph, so the next micro-batch would get no gradient for it.
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            yield


def saved_tensor_hooks() -> SavedTensorHooks | None:
    """The hooks that pack what autograd saves on this thread (for example, those of `save_on_cpu`)."""
    # torch has only a private function for this. Without it, workers run without the hooks.
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: SavedTensorHooks | None = None if top_hooks is None else top_hooks(False)
    return hooks


@contextmanager
def shared_cores(devices: list[torch.device]) -> Iterator[Callable[[], None]]:
    """A function that gives a CPU stage its share of torch's threads; each worker calls it.

    Every thread that calls torch has its own team of OpenMP threads. Without shares, n stages would use n
    times as many threads as the caller set.
    """
    stages = sum(device.type == "cpu" for device in devices)
    threads = torch.get_num_threads()
    if stages == 0:
        yield lambda: None
        return
    share = max(1, threads // stages)
    try:
        yield lambda: torch.set_num_threads(share)
    finally:
        # OpenMP has a number per thread, but torch and MKL also have one number for all threads.
        torch.set_num_threads(threads)


P = ParamSpec("P")
R = TypeVar("R")


class StageThreads:
    """A thread for each stage, for all its forward and backward passes.

    Threads start with the first job, and end when this object is deleted.

    >>> threads = StageThreads(2)
    >>> threads.submit(1, max, 3, 4).result()
    4
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._process = 0
        self._pools: list[ThreadPoolExecutor] = []

    def submit(self, stage: int, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a job for a stage's thread."""
        with self._lock:
            return self._pool(stage).submit(job, *args, **kwargs)

    def submit_all(self, job: Callable[[int], None]) -> list[Future[None]]:
        """Queue a job for every stage's thread, which gets the number of the stage.

        They have the same place in all queues, so that jobs of two callers do not wait for each other.
        """
        with self._lock:  # each with its own copy of the caller's context variables
            return [self._pool(j).submit(contextvars.copy_context().run, job, j) for j in range(self.count)]

    def _pool(self, stage: int) -> ThreadPoolExecutor:
        if self._process != os.getpid():  # threads do not survive a fork
            self._process = os.getpid()
            self._pools = [ThreadPoolExecutor(1, thread_name_prefix=f"stage {j}") for j in range(self.count)]
        return self._pools[stage]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, also in another process, has threads of its own.
        return StageThreads, (self.count,)


# Backward passes on the CPU, where autograd itself has only one thread.
#
# Autograd runs the nodes of the graph on the caller's thread. A stage's node only queues its work for the
# stage's thread, and returns placeholders: tensors of the right shape without memory, which hold the future
# of the real gradients. The barrier, the last node, waits for the threads and returns those of the input.
#
#     caller   gather ─ (2,1) (2,0) (1,1) (1,0) (0,1) (0,0) ─ barrier ... waits ... ─ input
#     stage 1            [  2,1  ][  1,1  ][  0,1  ]
#     stage 0                     [  2,0  ][  1,0  ][  0,0  ]


Gradients = tuple[Tensor | None, ...]


class BackwardThreads:
    """The backward jobs of one forward pass, run by the threads of the stages."""

    def __init__(self, threads: StageThreads) -> None:
        self.stages: int = threads.count
        self._lock = threading.Lock()
        self._threads = threads
        self._pending: set[Future[Any]] = set()
        self._failure: BaseException | None = None  # the first one
        self._cores = 1

    def submit(self, stage: int, job: Callable[[], Any]) -> Future[Any]:
        """Queue a job for a stage's thread."""
        with self._lock:
            if not self._pending:
                self._cores = torch.get_num_threads()
            # The job runs in the caller's context: a layer around this pipeline may hold the generators.
            future = self._threads.submit(stage, contextvars.copy_context().run, self._work, job)
            self._pending.add(future)
        future.add_done_callback(self._ended)
        return future

    def _work(self, job: Callable[[], Any]) -> Any:
        torch.set_num_threads(max(1, self._cores // self.stages))
        try:
            return job()
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            raise

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)
            if not self._pending:
                torch.set_num_threads(self._cores)  # torch and MKL also have one number for all threads

    def finish(self) -> None:
        """Wait for all jobs, and raise what the first failed one raised."""
        pending = list(self._pending)
        try:
            wait(pending, return_when=FIRST_EXCEPTION)
        finally:
            for job in pending:
                job.cancel()  # has no effect on jobs that run already
            wait(pending)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@dataclass(frozen=True)
class BackwardTask:
    """The backward pass of one stage on one micro-batch, queued for the stage's thread."""

    threads: BackwardThreads
    micro_batch: int
    stage: int

    def submit_recompute(self, recompute: Callable[[], None]) -> None:
        """Queue the recomputation."""
        i, j = self.micro_batch, self.stage
        name = f"stage {j}, micro-batch {i}, recomputation"
        self.threads.submit(j, lambda: traced(name, f"stage {j}", recompute))

    def submit_backward(
        self, grads: Gradients, backward: Callable[[Gradients], Gradients], inputs: tuple[Tensor, ...]
    ) -> Gradients:
        """Queue the backward pass, after those that compute `grads`. Returns placeholders for its results."""
        i, j = self.micro_batch, self.stage
        # Only the gradients of the last stage's outputs come from the caller.
        assert j == self.threads.stages - 1 or all(g is None or hasattr(g, _PROMISE) for g in grads)

        def job() -> Gradients:
            arrived = tuple(map(real_gradient, grads))
            try:
                name = f"stage {j}, micro-batch {i}, backward"
                return traced(name, f"stage {j}", backward, arrived)
            except BaseException as error:
                error.add_note(f"in the backward pass of stage {j} of the pipeline, on micro-batch {i}")
                raise

        future = self.threads.submit(j, job)
        return tuple(_placeholder(x, future, k) if x.requires_grad else None for k, x in enumerate(inputs))


_PROMISE = "promise"  # the attribute of a placeholder: the future of gradients, and the number of this one


def _placeholder(like: Tensor, future: Future[Gradients], number: int) -> Tensor:
    """A tensor with the shape of `like` and the memory of one element, in place of a gradient.

    Zeros: the anomaly mode of autograd refuses NaN.
    """
    placeholder = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
    setattr(placeholder, _PROMISE, (future, number))
    return placeholder


def real_gradient(gradient: Tensor | None) -> Tensor | None:
    """The gradient that a placeholder stands for, as soon as it is computed; others as they are."""
    if gradient is None or not hasattr(gradient, _PROMISE):
        return gradient
    promise: tuple[Future[Gradients], int] = getattr(gradient, _PROMISE)
    future, number = promise
    return future.result()[number]


def insert_barrier(threads: BackwardThreads, batches: list[Batch]) -> Tensor:
    """Insert the barrier before the first stage, and return a phony that depends on it.

    The phony connects a stage to the barrier if the stage's input needs no gradient.
    """
    slots = [(i, k) for i, batch in enumerate(batches) for k, x in enumerate(batch) if x.requires_grad]
    phony = get_phony(torch.device("cpu"), requires_grad=True)
    inputs = [batches[i][k] for i, k in slots]
    tied: Tensor
    tied, *outputs = BackwardBarrier.apply(phony, threads, *inputs)  # type: ignore[no-untyped-call]
    for (i, k), output in zip(slots, outputs, strict=True):
        batches[i][k] = output
    return tied


class BackwardBarrier(torch.autograd.Function):
    """Forward: the identity. Backward: waits for the threads, and returns the real gradients."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, threads: BackwardThreads, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.threads = threads
        ctx.set_materialize_grads(False)
        return phony.detach(), *(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.threads.finish()
        return None, None, *map(real_gradient, grads[1:])

"""One thread per stage, reused in every call, with its caller's state and its share of the cores.

New threads in every step would not reuse the memory of the last step (5,600 page faults in a step of 8
micro-batches, against 600), and would create their OpenMP teams again.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from intarsia.pipeline.gpipe.microbatch import Batch
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


@dataclass(frozen=True)
class Task:
    """The work of one stage on one micro-batch."""

    micro_batch: int
    stage: int
    compute: Callable[[], Batch]


@dataclass(frozen=True)
class TaskResult:
    """The result of a task: a batch, or an exception."""

    task: Task
    result: Batch | BaseException


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
            if self._process != os.getpid():  # threads do not survive a fork
                self._process = os.getpid()
                self._pools = [
                    ThreadPoolExecutor(1, thread_name_prefix=f"stage {j}") for j in range(self.count)
                ]
            return self._pools[stage].submit(job, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, also in another process, has threads of its own.
        return StageThreads, (self.count,)


def run_task(task: Task) -> TaskResult:
    """The result of a task, which may be its exception, so that no thread ends by it."""
    try:
        name = f"stage {task.stage}, micro-batch {task.micro_batch}"
        return TaskResult(task, traced(name, f"stage {task.stage}", task.compute))
    except BaseException as error:
        error.add_note(f"in stage {task.stage} of the pipeline, on micro-batch {task.micro_batch}")
        return TaskResult(task, error)


@contextmanager
def lend_workers(
    threads: StageThreads, report: Callable[[TaskResult], None], prepare: Callable[[], None] = lambda: None
) -> Iterator[Callable[[Task], None]]:
    """A function that hands out tasks to the threads of their stages, which report the results.

    All tasks have ended when the context ends.

    >>> done = []
    >>> with lend_workers(StageThreads(1), done.append) as hand_out:
    ...     hand_out(Task(0, 0, lambda: Batch(1)))
    >>> done[0].result.value
    1
    """
    # Tasks run with the caller's context variables.
    contexts = [contextvars.copy_context() for _ in range(threads.count)]
    jobs: list[Future[None]] = []

    def work(task: Task) -> None:
        prepare()
        report(run_task(task))

    def hand_out(task: Task) -> None:
        jobs.append(threads.submit(task.stage, contexts[task.stage].run, work, task))

    try:
        yield hand_out
    finally:
        # `report` may hand out more tasks, before its own job is done.
        while pending := [job for job in jobs if not job.done()]:
            wait(pending)

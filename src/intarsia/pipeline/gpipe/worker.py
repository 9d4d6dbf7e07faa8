"""One thread a stage, kept from call to call, with its caller's state and its share of the cores.

With new threads in every step the memory of the last one is not found again (5,600 page faults a step of 8
micro-batches, 600 now), and their OpenMP teams are made again.
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

# Autocast is kept per device type; these are the ones a stage can run on.
_AUTOCAST_DEVICES = ("cpu", "cuda")
SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, inference mode, autocast, default device and saved-tensor hooks, when captured.

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
        """Take the state over for a while."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind) or enabled:
                    # Autocast's cache of weights is one for all threads, and a weight cast under
                    # checkpointing (without a graph) would cut the gradient of the next micro-batch.
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            yield


def saved_tensor_hooks() -> SavedTensorHooks | None:
    """The hooks that pack what autograd saves on this thread (`save_on_cpu`, say)."""
    # torch has no public way to ask; a release without this one leaves workers without the hooks.
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: SavedTensorHooks | None = None if ask is None else ask(False)
    return hooks


@contextmanager
def shared_cores(devices: list[torch.device]) -> Iterator[Callable[[], None]]:
    """Give each CPU stage its part of torch's threads: what is handed out is to be called in each worker.

    Every thread that calls into torch has a team of OpenMP threads of its own, so n stages would
    otherwise put n times as many threads to work as the caller asked for.
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
        # OpenMP keeps the number per thread, but torch and MKL also keep one for all; put it back.
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
    """The result of a task: a batch, or the exception that ended it."""

    task: Task
    result: Batch | BaseException


class StageThreads:
    """A thread for each stage, started when first needed; they end when nothing holds this object.

    A stage keeps its thread, forward and backward, step after step.

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
        """Let a stage's thread do a job, after those it was given before."""
        with self._lock:
            if self._process != os.getpid():  # threads do not survive a fork
                self._process = os.getpid()
                self._pools = [
                    ThreadPoolExecutor(1, thread_name_prefix=f"stage {j}") for j in range(self.count)
                ]
            return self._pools[stage].submit(job, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what is loaded in another process, has threads of its own.
        return StageThreads, (self.count,)


def run_task(task: Task) -> TaskResult:
    """Run a task; whatever it raises is part of the answer, so that no thread dies with it."""
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
    """Hand out tasks to the threads of their stages, which report what became of them; waits for all.

    >>> done = []
    >>> with lend_workers(StageThreads(1), done.append) as hand_out:
    ...     hand_out(Task(0, 0, lambda: Batch(1)))
    >>> done[0].result.value
    1
    """
    # Context variables follow the caller as torch's own state does.
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
        # Whoever reports may hand out more, but only before its own job is done.
        while pending := [job for job in jobs if not job.done()]:
            wait(pending)

"""The pipeline: stages work on different micro-batches at the same time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from intarsia.pipeline.gpipe.checkpoint import Checkpointing, refuse_parameter_hooks
from intarsia.pipeline.gpipe.effects import StageEffects, StageRun
from intarsia.pipeline.gpipe.generators import GeneratorSnapshot
from intarsia.pipeline.gpipe.keyed_random import RandomKey, forget_layers, key_of_run
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.portal import SkipTrackerThroughPortals
from intarsia.pipeline.gpipe.skip import SkipLayout, inspect_skip_layout
from intarsia.pipeline.gpipe.stream import (
    AbstractStream,
    Copy,
    Wait,
    current_stream,
    fork,
    join,
    new_stream,
    use_device,
    use_stream,
)
from intarsia.pipeline.gpipe.worker import (
    BackwardTask,
    BackwardThreads,
    StageThreads,
    Task,
    TaskResult,
    ThreadState,
    insert_barrier,
    lend_workers,
    run_task,
    shared_cores,
)


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """The schedule of `m` micro-batches over `n` stages: (micro-batch, stage) pairs, tick by tick.

        m=3, n=3    tick 0 1 2 3 4
        stage 0          0 1 2
        stage 1            0 1 2
        stage 2              0 1 2

    >>> list(clock_cycles(2, 2))
    [[(0, 0)], [(1, 0), (0, 1)], [(1, 1)]]
    """
    for tick in range(m + n - 1):
        yield [(tick - j, j) for j in range(max(tick - m + 1, 0), min(tick + 1, n))]


class Progress:
    """The progress of each stage, and the tasks that may run next.

    `keeps` tells for each stage but the last whether the backward pass keeps its outputs in memory anyway.
    """

    def __init__(self, m: int, keeps: list[bool]) -> None:
        self.m: int = m
        self.n: int = len(keeps) + 1
        self.keeps = keeps
        self.submitted: list[int] = [0] * self.n
        self.done: list[int] = [0] * self.n
        self.failures: list[TaskResult] = []
        self.stop = False

    def record(self, result: TaskResult) -> bool:
        """Count a task that has ended, and return whether its output is still needed."""
        self.done[result.task.stage] += 1
        if isinstance(result.result, BaseException):
            self.failures.append(result)
        return not self.failures and not self.stop

    def possible(self) -> Iterator[tuple[int, int]]:
        """The tasks that can start now; none after a failure."""
        for j in range(self.n):
            i = self.submitted[j]
            if self.failures or self.stop or i == self.m or self.done[j] < i:
                continue
            if self._too_far_ahead(i, j) or (j > 0 and self.done[j - 1] <= i):
                continue
            yield i, j

    def _too_far_ahead(self, i: int, j: int) -> bool:
        """Whether stage j must wait until the next stage is one micro-batch behind.

        This limits the outputs in memory. If the backward pass keeps them anyway, the stage may run ahead, so
        that a delay in one stage does not delay the others. The last micro-batch always waits: it updates
        deferred batch norms, and a later stage may still fail on an earlier micro-batch.
        """
        if j == self.n - 1 or i < 2 or (self.keeps[j] and i < self.m - 1):
            return False
        return self.done[j + 1] < i - 1

    @property
    def over(self) -> bool:
        """Whether all tasks are done or, after a failure, all submitted tasks have ended."""
        return self.done[-1] == self.m or bool(self.failures and self.submitted == self.done)

    @property
    def first_failure(self) -> TaskResult:
        """The failure that comes first in the order of clock cycles."""
        return min(self.failures, key=lambda f: (f.task.micro_batch + f.task.stage, f.task.stage))


class StageResources:
    """The state of stages between mini-batches: devices, threads, streams, and observed effects."""

    def __init__(
        self, partitions: Iterable[nn.Sequential], devices: Sequence[torch.device] | None = None
    ) -> None:
        partitions = list(partitions)
        self.devices: list[torch.device] = list(devices or [torch.device("cpu")] * len(partitions))
        self.skip_layout: SkipLayout = inspect_skip_layout(partitions)
        self.effects: list[StageEffects] = [StageEffects() for _ in partitions]
        self.threads = StageThreads(len(partitions))
        self._copy_streams: list[list[AbstractStream]] = [[] for _ in partitions]

    def copy_streams(self, count: int) -> list[list[AbstractStream]]:
        """A copy stream for every stage and micro-batch, created once."""
        for device, streams in zip(self.devices, self._copy_streams, strict=True):
            streams.extend(new_stream(device) for _ in range(count - len(streams)))
        return self._copy_streams

    def __getstate__(self) -> dict[str, Any]:
        # Streams belong to this process, and effects refer to the modules of this copy.
        fresh = [StageEffects() for _ in self.effects]
        return dict(self.__dict__, _copy_streams=[[] for _ in self.devices], effects=fresh)


class Pipeline:
    """Runs micro-batches through stages. After `run`, `batches` has the outputs.

    >>> batches = [Batch(torch.zeros(1)), Batch(torch.ones(1))]
    >>> stages = [nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())]
    >>> Pipeline(batches, stages).run()
    >>> [batch.tensor.item() for batch in batches]
    [0.0, 1.0]
    """

    def __init__(
        self,
        batches: list[Batch],
        partitions: Iterable[nn.Sequential],
        resources: StageResources | None = None,
        *,
        checkpoint_stop: int = 0,
        concurrent_backward: bool | None = None,
    ) -> None:
        self.batches = batches
        self.partitions: list[nn.Sequential] = list(partitions)
        self.resources: StageResources = resources or StageResources(self.partitions)
        self.devices: list[torch.device] = self.resources.devices
        self.copy_streams: list[list[AbstractStream]] = self.resources.copy_streams(len(batches))
        self.checkpoint_stop = checkpoint_stop
        self.concurrent_backward: bool = (
            checkpoint_stop > 0 if concurrent_backward is None else concurrent_backward
        )

    def run(self) -> None:
        """Run all stages. An exception of a stage is raised here, with a note on stage and micro-batch."""
        m, n = len(self.batches), len(self.partitions)
        self._state = ThreadState.capture()
        self._parameters = [list(stage.parameters()) for stage in self.partitions]
        if self._state.grad and (self.checkpoint_stop or self._concurrent()):
            refuse_parameter_hooks(p for own in self._parameters for p in own)
        self._key: RandomKey
        self._streams = [current_stream(device) for device in self.devices]
        self._skip_trackers = [SkipTrackerThroughPortals(self.resources.skip_layout) for _ in range(m)]
        self._checkpoints: dict[int, Checkpointing] = {}
        self._backward_threads: BackwardThreads | None = None
        self._barrier: Tensor | None = None
        self._phonies: dict[int, Tensor] = {}
        with key_of_run() as self._key:
            snapshot = GeneratorSnapshot.take()
            if m == 1 or n == 1:  # no two tasks can run at the same time
                self._run_alone()
            else:
                self._run_workers()
            if snapshot.others_drew():
                self._forget_effects()

    def _concurrent(self) -> bool:
        """Whether the backward passes of stages run on threads of their own."""
        several = len(self.batches) > 1 and len(self.partitions) > 1
        possible = several and self._state.grad and all(d.type == "cpu" for d in self.devices)
        return self.concurrent_backward and possible

    def _run_alone(self) -> None:
        """Run all tasks on the calling thread, tick by tick."""
        m, n = len(self.batches), len(self.partitions)
        for schedule in clock_cycles(m, n):
            for i, j in schedule:
                self._finish(run_task(self._task(i, j)))

    def _run_workers(self) -> None:
        """Run each stage on a thread of its own; a task starts as soon as its inputs exist."""
        pack = self._state.saved_tensor_hooks[0] if self._state.saved_tensor_hooks is not None else None
        if getattr(pack, "__module__", "") == torch.utils.checkpoint.__name__:
            # Without reentry, it identifies saved tensors by their order, which threads change (torch 2.13).
            raise RuntimeError(
                "a pipeline with several stages and micro-batches runs under torch.utils.checkpoint with"
                " use_reentrant=True only"
            )
        m, n = len(self.batches), len(self.partitions)
        if self._concurrent():
            self._backward_threads = BackwardThreads(self.resources.threads)
            self._barrier = insert_barrier(self._backward_threads, self.batches)
        progress = Progress(m, self._keeps())
        inbox: SimpleQueue[TaskResult | None] = SimpleQueue()
        lock = threading.Lock()

        def advance(result: TaskResult | None = None) -> None:
            """Store the result of a task, and hand out the tasks that are now possible."""
            with lock, self._state.enter():
                try:
                    if result is not None and progress.record(result):
                        self._finish(result)
                    for i, j in progress.possible():
                        hand_out(self._task(i, j))
                        progress.submitted[j] += 1
                except BaseException as error:
                    progress.failures.append(TaskResult(Task(m, n, _nothing), error))
            if progress.over:
                inbox.put(None)

        # On the CPU, workers call `advance`. On GPUs, the caller does: a thread has its own current stream.
        on_cpu = all(device.type != "cuda" for device in self.devices)
        report, threads = advance if on_cpu else inbox.put, self.resources.threads
        with (
            shared_cores(self.devices) as prepare,
            lend_workers(threads, report, prepare) as hand_out,
        ):
            try:
                advance()
                while not progress.over:
                    result = inbox.get()
                    if result is not None:
                        advance(result)
            finally:
                progress.stop = True  # if the caller is interrupted, no further task starts
        if progress.failures:
            raise cast(BaseException, progress.first_failure.result)

    def _forget_effects(self) -> None:
        """Observe all stages again, since something drew without a key; and warn."""
        for stage, effects in zip(self.partitions, self.resources.effects, strict=True):
            effects.reset()
            forget_layers(list(stage.children()))
        warnings.warn(
            "random numbers were drawn from torch's default generator while the pipeline ran; if a layer drew"
            " them, but not on its first micro-batch, its recomputation may differ",
            stacklevel=5,
        )

    def _keeps(self) -> list[bool]:
        """For each stage but the last, whether the next stage saves its outputs for the backward pass.

        It does not if nothing so far needs a gradient; and between devices, it saves a copy.
        """
        needs = [any(p.requires_grad for p in own) for own in self._parameters]
        needs[0] |= any(x.requires_grad for batch in self.batches for x in batch)
        borders = range(len(needs) - 1)
        return [self._state.grad and any(needs[: j + 2]) and not self._crosses(j, j + 1) for j in borders]

    def _task(self, i: int, j: int) -> Task:
        """The task of a stage on a micro-batch. Copies its input to the stage's device."""
        self._fence(i, j)
        batch, device, stream = self.batches[i], self.devices[j], self._streams[j]
        checkpointed = i < self.checkpoint_stop and self._state.grad
        backward_task = None if self._backward_threads is None else BackwardTask(self._backward_threads, i, j)
        barrier = self._barrier if j == 0 else None
        run = StageRun(
            self.partitions[j],
            device,
            self.resources.effects[j],
            self._skip_trackers[i],
            (i, j),
            self._key,
            self._parameters[j],
        )

        def compute() -> Batch:
            with self._state.enter(), use_device(device), use_stream(stream):
                if self._crosses(j - 1, j):
                    batch[:] = Wait.apply(self.copy_streams[j][i], stream, *batch)  # type: ignore[no-untyped-call]
                output, checkpoint = run.compute(
                    batch, checkpointed=checkpointed, backward_task=backward_task, phony=barrier
                )
            if checkpoint is not None:
                self._checkpoints[i] = checkpoint
            return output

        return Task(i, j, compute)

    def _fence(self, i: int, j: int) -> None:
        """Copy a micro-batch and its skips to a stage's device, and order it after the previous micro-batch.

        The backward pass has the reverse order: the previous micro-batch waits for this one.
        """
        batch = self.batches[i]
        position = batch.carrier
        if j in self._phonies and position is not None:
            batch[position] = join(batch[position], self._phonies.pop(j))
        for source, ns, name in self.resources.skip_layout.copy_policy(j):
            if self._crosses(source, j):
                streams = self.copy_streams[source][i], self.copy_streams[j][i]
                self._skip_trackers[i].copy(batch, *streams, ns, name)
        if self._crosses(j - 1, j):
            streams = self.copy_streams[j - 1][i], self.copy_streams[j][i]
            batch[:] = Copy.apply(*streams, *batch)  # type: ignore[no-untyped-call]

    def _finish(self, result: TaskResult) -> None:
        """Store a task's output, or raise its exception."""
        if isinstance(result.result, BaseException):
            raise result.result
        i, j, batch = result.task.micro_batch, result.task.stage, result.result
        if j + 1 < len(self.partitions) and self._leaves(j):
            streams = self._streams[j], self.copy_streams[j][i]
            batch[:] = Wait.apply(*streams, *batch)  # type: ignore[no-untyped-call]
        checkpoint = self._checkpoints.pop(i, None)
        if checkpoint is not None:
            with use_device(self.devices[j]):
                checkpoint.recompute(batch)
        position = batch.carrier
        if i + 1 < len(self.batches) and position is not None:
            batch[position], self._phonies[j] = fork(batch[position])
        self.batches[i] = batch

    def _crosses(self, source: int, target: int) -> bool:
        """Whether two stages are on different devices; False for the input of the first stage."""
        return source >= 0 and self.devices[source] != self.devices[target]

    def _leaves(self, source: int) -> bool:
        """Whether a stage's output, or a skip, goes to another device."""
        routes = self.resources.skip_layout.by_ns_name.values()
        return self._crosses(source, source + 1) or any(
            a == source and self._crosses(a, b) for a, b in routes
        )


def _nothing() -> Batch:
    raise AssertionError("a placeholder for a task that could not be created")

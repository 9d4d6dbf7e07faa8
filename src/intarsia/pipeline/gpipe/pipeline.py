"""The pipeline: stages work on different micro-batches at the same time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from itertools import chain
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from intarsia.pipeline.gpipe.checkpoint import Checkpointing, refuse_parameter_hooks
from intarsia.pipeline.gpipe.effects import StageEffects, StageRun
from intarsia.pipeline.gpipe.generators import GeneratorSnapshot
from intarsia.pipeline.gpipe.keyed_random import RandomKey, forget_layers, key_of_run
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip import Key, StageSkips, inspect_skip_layout
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
    ThreadState,
    insert_barrier,
    shared_cores,
)
from intarsia.tracing import traced


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
    """The progress of each stage. The threads of stages wait here for their next micro-batch.

    `keeps` tells for each stage but the last whether the backward pass keeps its outputs in memory anyway.
    """

    def __init__(self, m: int, keeps: list[bool]) -> None:
        self.m: int = m
        self.keeps = keeps
        self.done: list[int] = [0] * (len(keeps) + 1)
        self.failures: list[tuple[int, int, BaseException]] = []  # (micro-batch, stage, exception)
        self.stopped = False
        self._changed = threading.Condition()

    def wait(self, i: int, j: int) -> bool:
        """Wait until stage j can run micro-batch i; False if it must not, after a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self._can_run(i, j))
            return not self.stopped

    def end(self, j: int) -> None:
        """Count a micro-batch that stage j has finished."""
        with self._changed:
            self.done[j] += 1
            self._changed.notify_all()

    def stop(self, *failures: tuple[int, int, BaseException]) -> None:
        """Let no stage begin another micro-batch."""
        with self._changed:
            self.failures += failures
            self.stopped = True
            self._changed.notify_all()

    def _can_run(self, i: int, j: int) -> bool:
        """Whether the stage before has finished the micro-batch, and the next stage is not too far behind.

        A stage waits until the next stage is one micro-batch behind, which limits the outputs in memory. If
        the backward pass keeps them anyway, the stage may run ahead, so that a delay in one stage does not
        delay the others. The last micro-batch always waits: it updates deferred batch norms, and a later
        stage may still fail on an earlier micro-batch.
        """
        if j > 0 and self.done[j - 1] <= i:
            return False
        ahead = j == len(self.keeps) or i < 2 or (self.keeps[j] and i < self.m - 1)
        return ahead or self.done[j + 1] >= i - 1

    @property
    def first_failure(self) -> BaseException | None:
        """The failure that comes first in the order of clock cycles."""
        first = min(self.failures, key=lambda f: (f[0] + f[1], f[1]), default=None)
        return None if first is None else first[2]


class StageResources:
    """The state of stages between mini-batches: devices, threads, streams, and observed effects."""

    def __init__(
        self, partitions: Iterable[nn.Sequential], devices: Sequence[torch.device] | None = None
    ) -> None:
        partitions = list(partitions)
        self.devices: list[torch.device] = list(devices or [torch.device("cpu")] * len(partitions))
        self.skips: list[StageSkips] = inspect_skip_layout(partitions)
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
        self._skips: list[dict[Key, Any]] = [{} for _ in range(m)]  # on their way between stages
        self._backward_threads: BackwardThreads | None = None
        self._barrier: Tensor | None = None
        self._phonies: dict[int, Tensor] = {}
        with key_of_run() as self._key:
            snapshot = GeneratorSnapshot.take()
            if m == 1 or n == 1:  # no two tasks can run at the same time
                for i, j in chain.from_iterable(clock_cycles(m, n)):
                    self._run_task(i, j)
            else:
                self._run_threads()
            if snapshot.others_drew():
                self._forget_effects()

    def _concurrent(self) -> bool:
        """Whether the backward passes of stages run on threads of their own."""
        several = len(self.batches) > 1 and len(self.partitions) > 1
        possible = several and self._state.grad and all(d.type == "cpu" for d in self.devices)
        return self.concurrent_backward and possible

    def _run_threads(self) -> None:
        """Run each stage on a thread of its own; a task starts as soon as its inputs exist."""
        pack = self._state.saved_tensor_hooks[0] if self._state.saved_tensor_hooks is not None else None
        if getattr(pack, "__module__", "") == torch.utils.checkpoint.__name__:
            # Without reentry, it identifies saved tensors by their order, which threads change (torch 2.13).
            raise RuntimeError(
                "a pipeline with several stages and micro-batches runs under torch.utils.checkpoint with"
                " use_reentrant=True only"
            )
        if self._concurrent():
            self._backward_threads = BackwardThreads(self.resources.threads)
            self._barrier = insert_barrier(self._backward_threads, self.batches)
        progress = Progress(len(self.batches), self._keeps())

        def run_stage(j: int) -> None:
            i = 0
            try:
                prepare()
                for i in range(len(self.batches)):
                    if not progress.wait(i, j):
                        return
                    self._run_task(i, j)
                    progress.end(j)
            except BaseException as error:
                progress.stop((i, j, error))

        with shared_cores(self.devices) as prepare:
            jobs = self.resources.threads.submit_all(run_stage)
            try:
                wait(jobs)
            finally:
                progress.stop()  # if the caller is interrupted, no further task starts
                wait(jobs)
        if (failure := progress.first_failure) is not None:
            raise failure

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

    def _run_task(self, i: int, j: int) -> None:
        """Run a stage on a micro-batch, on the thread and the stream of the stage."""
        try:
            with self._state.enter(), use_device(self.devices[j]), use_stream(self._streams[j]):
                batch = self._fence(i, j)
                output, checkpoint = traced(
                    f"stage {j}, micro-batch {i}", f"stage {j}", self._compute, i, j, batch
                )
                self._finish(i, j, output, checkpoint)
        except BaseException as error:
            error.add_note(f"in stage {j} of the pipeline, on micro-batch {i}")
            raise

    def _fence(self, i: int, j: int) -> Batch:
        """The input of a stage on its device, with the skips that it takes, after the previous micro-batch.

        The backward pass has the reverse order: the previous micro-batch waits for this one.
        """
        batch, takes = self.batches[i], self.resources.skips[j].takes
        position = batch.carrier
        if j in self._phonies and position is not None:
            batch[position] = join(batch[position], self._phonies.pop(j))
        self._receive(batch, i, j - 1, j)
        if not takes:
            return batch
        skips = [Batch([self._skips[i].pop(key)]) for key in takes]
        for skip, source in zip(skips, takes.values(), strict=True):
            self._receive(skip, i, source, j)
        return Batch((batch.value, tuple(skip.value[0] for skip in skips)))

    def _receive(self, batch: Batch, i: int, source: int, j: int) -> None:
        """Copy tensors of an earlier stage to the device of this one, whose stream waits for the copies."""
        if self._crosses(source, j) and len(batch):
            target = self.copy_streams[j][i]
            copies = Copy.apply(self.copy_streams[source][i], target, *batch)  # type: ignore[no-untyped-call]
            batch[:] = Wait.apply(target, self._streams[j], *copies)  # type: ignore[no-untyped-call]

    def _compute(self, i: int, j: int, batch: Batch) -> tuple[Batch, Checkpointing | None]:
        threads, resources = self._backward_threads, self.resources
        effects, skips, parameters = resources.effects[j], resources.skips[j], self._parameters[j]
        run = StageRun(self.partitions[j], self.devices[j], effects, skips, (i, j), self._key, parameters)
        return run.compute(
            batch,
            checkpointed=i < self.checkpoint_stop and self._state.grad,
            backward_task=None if threads is None else BackwardTask(threads, i, j),
            phony=self._barrier if j == 0 else None,
        )

    def _finish(self, i: int, j: int, batch: Batch, checkpoint: Checkpointing | None) -> None:
        """Store a stage's output, and the skips that it gives."""
        if self._leaves(j) and len(batch):
            streams = self._streams[j], self.copy_streams[j][i]
            batch[:] = Wait.apply(*streams, *batch)  # type: ignore[no-untyped-call]
        if checkpoint is not None:
            checkpoint.recompute(batch)
        if gives := self.resources.skips[j].gives:
            value, skips = batch.value
            self._skips[i].update(zip(gives, skips, strict=True))
            batch = Batch(value)
        if len(batch) == 0:
            raise TypeError(f"a stage must return tensors, got {batch.value!r}")
        position = batch.carrier
        if i + 1 < len(self.batches) and position is not None:
            batch[position], self._phonies[j] = fork(batch[position])
        self.batches[i] = batch

    def _crosses(self, source: int, target: int) -> bool:
        """Whether two stages are on different devices; False for the input of the first stage."""
        return source >= 0 and self.devices[source] != self.devices[target]

    def _leaves(self, j: int) -> bool:
        """Whether a stage's output, or a skip, goes to another device."""
        following = [j + 1] if j + 1 < len(self.devices) else []
        return any(self._crosses(j, k) for k in [*following, *self.resources.skips[j].gives.values()])

"""One thread per stage for the backward pass on the CPU, where autograd itself has only one.

Autograd runs the nodes of the graph on the caller's thread. A stage's node only queues its work for the
stage's thread, and returns placeholders: tensors of the right shape without memory. The real gradients pass
from stage to stage outside the graph. The barrier, the last node, waits for the threads and returns the
gradients of the input.

    caller   gather ─ (2,1) (2,0) (1,1) (1,0) (0,1) (0,0) ─ barrier ... waits ... ─ input
    stage 1            [  2,1  ][  1,1  ][  0,1  ]
    stage 0                     [  2,0  ][  1,0  ][  0,0  ]
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.stream import get_phony
from intarsia.pipeline.gpipe.worker import StageThreads
from intarsia.tracing import traced

Gradients = tuple[Tensor | None, ...]


class BackwardThreads:
    """The backward jobs of one forward pass, run by the threads of the stages."""

    def __init__(self, threads: StageThreads) -> None:
        self.stages: int = threads.count
        # The gradients of a stage's input, by (micro-batch, stage), until the stage before takes them.
        self.gradients: dict[tuple[int, int], Future[Gradients]] = {}
        self.recomputed: dict[tuple[int, int], Future[None]] = {}
        self._lock = threading.Lock()
        self._threads = threads
        self._pending: set[Future[Any]] = set()
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
        return job()

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)
            if not self._pending:
                torch.set_num_threads(self._cores)  # torch and MKL also have one number for all threads

    def finish(self) -> dict[int, Gradients]:
        """The gradients of the first stage's input, by micro-batch. Waits, and raises what a job raised."""
        waiting = [(i, future) for (i, stage), future in self.gradients.items() if stage == 0]
        self.gradients.clear()
        self.recomputed.clear()
        try:
            return {i: future.result() for i, future in waiting}
        except BaseException:
            for future in list(self._pending):
                future.cancel()  # has no effect on jobs that run already
            raise
        finally:
            wait(list(self._pending))


@dataclass(frozen=True)
class BackwardTask:
    """The backward pass of one stage on one micro-batch, queued for the stage's thread."""

    threads: BackwardThreads
    micro_batch: int
    stage: int

    def submit_recompute(self, recompute: Callable[[], None]) -> None:
        """Queue the recomputation, after that of the next stage: a skip may connect the two."""
        i, j = self.micro_batch, self.stage
        later = self.threads.recomputed.get((i, j + 1))

        def job() -> None:
            if later is not None:
                later.result()
            traced(f"stage {j}, micro-batch {i}, recomputation", f"stage {j}", recompute)

        self.threads.recomputed[(i, j)] = self.threads.submit(j, job)

    def submit_backward(self, grads: Gradients, backward: Callable[[Gradients], Gradients]) -> None:
        """Queue the backward pass, after the gradient of the stage's output."""
        i, j = self.micro_batch, self.stage
        later = self.threads.gradients.pop((i, j + 1), None)
        recomputed = self.threads.recomputed.get((i, j))

        def job() -> Gradients:
            if recomputed is not None:
                recomputed.result()
            arrived = grads if later is None else later.result()
            try:
                name = f"stage {j}, micro-batch {i}, backward"
                return traced(name, f"stage {j}", backward, arrived)
            except BaseException as error:
                error.add_note(f"in the backward pass of stage {j} of the pipeline, on micro-batch {i}")
                raise

        self.threads.gradients[(i, j)] = self.threads.submit(j, job)


def placeholder_gradient(like: Tensor) -> Tensor:
    """A tensor with the shape of `like` and the memory of one element, in place of a gradient."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def insert_barrier(threads: BackwardThreads, batches: list[Batch]) -> Tensor:
    """Insert the barrier before the first stage, and return a phony that depends on it.

    The phony connects a stage to the barrier if the stage's input needs no gradient.
    """
    slots = [(i, k) for i, batch in enumerate(batches) for k, x in enumerate(batch) if x.requires_grad]
    phony = get_phony(torch.device("cpu"), requires_grad=True)
    inputs = [batches[i][k] for i, k in slots]
    tied: Tensor
    tied, *outputs = BackwardBarrier.apply(phony, threads, slots, *inputs)  # type: ignore[no-untyped-call]
    for (i, k), output in zip(slots, outputs, strict=True):
        batches[i][k] = output
    return tied


class BackwardBarrier(torch.autograd.Function):
    """Forward: the identity. Backward: waits for the threads, and returns the real gradients."""

    @staticmethod
    def forward(
        ctx: Any, phony: Tensor, threads: BackwardThreads, slots: list[tuple[int, int]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.threads, ctx.slots = threads, slots
        ctx.set_materialize_grads(False)
        return phony.detach(), *(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        gradients = ctx.threads.finish()
        return None, None, None, *(gradients[i][k] if i in gradients else None for i, k in ctx.slots)

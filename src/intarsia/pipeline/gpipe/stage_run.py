"""One stage on one micro-batch; under checkpointing, it runs a second time for the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.pipeline.gpipe.backward_threads import BackwardTask
from intarsia.pipeline.gpipe.checkpoint import Checkpointing
from intarsia.pipeline.gpipe.effects import BufferSnapshot, StageEffects, owned_buffers, versions
from intarsia.pipeline.gpipe.generators import CPU, borrowed_generators
from intarsia.pipeline.gpipe.keyed_random import RandomKey, SeenDraws, using_key
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip.tracker import SkipTracker, use_skip_tracker


class StageRun:
    """Runs a stage on a micro-batch, observes its effects, and can repeat the run exactly."""

    def __init__(
        self,
        stage: nn.Module,
        device: torch.device,
        effects: StageEffects,
        skip_tracker: SkipTracker,
        place: tuple[int, int],
        key: RandomKey,
        parameters: Sequence[Tensor],
    ) -> None:
        self.stage = stage
        self.device = device
        self.effects = effects
        self.skip_tracker = skip_tracker
        self.place = place
        self.key: RandomKey = key.of(place[0])
        self.parameters = parameters  # of the stage; collected once for all micro-batches
        self.observing: bool = not effects.known_for(stage)
        self.mutates_input: bool = self.observing or effects.mutates_input
        self.mutated: bool = False
        self.buffers: BufferSnapshot = BufferSnapshot([], [])

    def compute(
        self,
        batch: Batch,
        *,
        checkpointed: bool,
        backward_task: BackwardTask | None = None,
        phony: Tensor | None = None,
    ) -> tuple[Batch, Checkpointing | None]:
        """The stage's output, and the checkpoint that `recompute` must still be called on."""
        if checkpointed:
            checkpoint = Checkpointing(self, batch, self, backward_task, phony, self.parameters)
            return _checked(checkpoint.checkpoint()), checkpoint
        if backward_task is not None:
            return _checked(
                Checkpointing(self, batch, self, backward_task, phony, self.parameters).keep()
            ), None
        with self.record(again=False):
            return _checked(batch.call(self)), None

    def __call__(self, value: Any) -> Any:
        """The stage's output. The stage gets a copy of its input if it changes it."""
        batch = Batch(value)
        if self.mutates_input:
            batch[:] = tuple(x.clone() for x in batch)
        before = versions(batch)
        try:
            with use_skip_tracker(self.skip_tracker), using_key(self.key):
                output = self.stage(batch.value)
            self.mutated = versions(batch) != before
            if self.mutated and not self.mutates_input:
                raise RuntimeError("the stage changed its input in place, but not on its first micro-batch")
        except BaseException:
            self.effects.reset()  # the stage may have other effects now; observe the next mini-batch
            raise
        return output

    @contextmanager
    def record(self, *, again: bool = True) -> Iterator[None]:
        """The context of the first run: saves what a second run needs, and observes the stage's effects."""
        if self.observing:
            self.buffers = BufferSnapshot.take(owned_buffers(self.stage))
        elif again:
            self.buffers = BufferSnapshot.take(self.effects.buffers)
        yield
        if self.observing:
            self.buffers = self.buffers.changed()
            self.effects.observe(self.stage, self.mutated, self.buffers.owners)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """The context of the second run: the buffers of the first run. Random numbers are equal by key."""
        with self.buffers.replayed():
            try:
                yield
            except BaseException as error:
                i, j = self.place
                error.add_note(
                    f"in stage {j} of the pipeline, computing micro-batch {i} again for the gradient"
                )
                raise

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The context of a backward pass beside those of other stages. If it draws, it borrows generators."""
        devices = self.effects.backward_draws
        if devices is not None:
            with borrowed_generators(devices) if devices else nullcontext():
                yield
            return
        with borrowed_generators({CPU, self.device}), SeenDraws() as seen:
            yield
        self.effects.backward_draws = frozenset(seen.devices)


def _checked(output: Batch) -> Batch:
    if len(output) == 0:
        raise TypeError(f"a stage must return tensors, got {output.value!r}")
    return output

"""The run of one stage on one micro-batch, and its side effects, observed on the first micro-batch.

A stage may change its input in place, change its buffers, or draw random numbers in its backward pass (if a
layer uses `torch.utils.checkpoint`). Each effect must be undone or isolated when the stage runs again for the
gradient, or beside other stages. For stages without an effect, this costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.pipeline.gpipe.checkpoint import Checkpointing
from intarsia.pipeline.gpipe.generators import CPU, borrowed_generators
from intarsia.pipeline.gpipe.keyed_random import RandomKey, SeenDraws, using_key
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip import SkipTracker, StageSkips, use_skip_tracker
from intarsia.pipeline.gpipe.worker import BackwardTask

Owner = tuple[nn.Module, str]


@dataclass
class StageEffects:
    """The side effects of one stage, and the mode (training or not, by module) they were observed in."""

    observed_mode: tuple[bool, ...] | None = None
    mutates_input: bool = True
    backward_draws: frozenset[torch.device] | None = None  # None: not observed yet
    buffers: list[Owner] = field(default_factory=list)

    def known_for(self, stage: nn.Module) -> bool:
        """Whether the effects were observed in the stage's present mode."""
        return self.observed_mode == _mode(stage)

    def reset(self) -> None:
        """Assume every effect until the stage is observed again."""
        self.observed_mode = self.backward_draws = None

    def observe(self, stage: nn.Module, mutates_input: bool, buffers: list[Owner]) -> None:
        """Store the effects of the stage."""
        self.observed_mode, self.backward_draws = _mode(stage), None
        self.mutates_input = mutates_input
        self.buffers = buffers


def _mode(stage: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in stage.modules())


def owned_buffers(stage: nn.Module) -> list[Owner]:
    """Every buffer of a stage, as (module, name in the module)."""
    owners: dict[int, Owner] = {}
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                owners.setdefault(id(buffer), (module, name))
    return list(owners.values())


@dataclass(frozen=True)
class BufferSnapshot:
    """Copies of the values of buffers."""

    values: dict[Owner, Tensor] = field(default_factory=dict)

    @staticmethod
    @torch.no_grad()
    def take(owners: Iterable[Owner]) -> BufferSnapshot:
        """The present values."""
        return BufferSnapshot({owner: _buffer(owner).clone() for owner in owners})

    def changed(self) -> BufferSnapshot:
        """The buffers of modules in which a buffer has changed; NaN equals NaN.

        All buffers of such a module count: a running mean may stay equal by chance and change the next time.
        """
        touched = {owner[0] for owner, value in self.values.items() if not _same(_buffer(owner), value)}
        return BufferSnapshot({owner: value for owner, value in self.values.items() if owner[0] in touched})

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Give the modules copies of these values for a while."""
        # The tensors are exchanged, not their contents: autograd may have saved the present tensors.
        present = {owner: _buffer(owner) for owner in self.values}
        for (module, name), value in self.values.items():
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), buffer in present.items():
                module._buffers[name] = buffer


def _buffer(owner: Owner) -> Tensor:
    module, name = owner
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


def _same(a: Tensor, b: Tensor) -> bool:
    if a.is_meta:  # a meta tensor has no values
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def versions(batch: Batch) -> list[int]:
    """The version counter of each tensor, which in-place changes increase; -1 for inference tensors."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in batch]


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Restore the buffers (also those that the model rebinds) and the random state at the end.

    Not every attribute, as `capture.protect.undisturbed` does: a stage may be sharded, and FSDP exchanges its
    parameters in a forward pass. Nor are tensors exchanged as by `replayed`: others may hold the same ones.

    >>> norm = nn.BatchNorm1d(2)
    >>> with trial(norm):
    ...     norm(torch.randn(4, 2)).shape
    torch.Size([4, 2])
    >>> int(norm.num_batches_tracked)
    0
    """
    held = [(module, dict(module._buffers)) for module in model.modules()]
    values = {id(b): b.clone() for _, buffers in held for b in buffers.values() if b is not None}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for module, buffers in held:
                module._buffers.update(buffers)
                for buffer in buffers.values():
                    if buffer is not None:
                        buffer.copy_(values[id(buffer)])


class StageRun:
    """Runs a stage on a micro-batch, observes its effects, and can repeat the run exactly."""

    def __init__(
        self,
        stage: nn.Module,
        device: torch.device,
        effects: StageEffects,
        skips: StageSkips,
        place: tuple[int, int],
        key: RandomKey,
        parameters: Sequence[Tensor],
    ) -> None:
        self.stage = stage
        self.device = device
        self.effects = effects
        self.skips = skips
        self.place = place
        self.key: RandomKey = key.of(place[0])
        self.parameters = parameters  # of the stage; collected once for all micro-batches
        self.observing: bool = not effects.known_for(stage)
        self.mutates_input: bool = self.observing or effects.mutates_input
        self.mutated: bool = False
        self.buffers: BufferSnapshot = BufferSnapshot()

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
            checkpoint = Checkpointing(self, batch, backward_task, phony, self.parameters)
            return checkpoint.checkpoint(), checkpoint
        if backward_task is not None:
            return Checkpointing(self, batch, backward_task, phony, self.parameters).keep(), None
        with self.record(again=False):
            return batch.call(self), None

    def __call__(self, value: Any) -> Any:
        """The stage's output. The stage gets a copy of its input if it changes it.

        If the stage takes skips, its input is a pair: the micro-batch and the skips. So is its output if it
        gives any.
        """
        batch = Batch(value)
        if self.mutates_input:
            batch[:] = tuple(x.clone() for x in batch)
        before, takes, gives = versions(batch), self.skips.takes, self.skips.gives
        value, skips = batch.value if takes else (batch.value, ())
        tracker = SkipTracker(dict(zip(takes, skips, strict=True)))
        try:
            with use_skip_tracker(tracker), using_key(self.key):
                output = self.stage(value)
            self.mutated = versions(batch) != before
            if self.mutated and not self.mutates_input:
                raise RuntimeError("the stage changed its input in place, but not on its first micro-batch")
        except BaseException:
            self.effects.reset()  # the stage may have other effects now; observe the next mini-batch
            raise
        return (output, tuple(tracker.tensors[key] for key in gives)) if gives else output

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
            self.effects.observe(self.stage, self.mutated, list(self.buffers.values))

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

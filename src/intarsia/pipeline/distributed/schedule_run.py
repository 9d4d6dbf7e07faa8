"""torch's schedule over this rank's stages, for batches of one size and precision.

If a rank raised in the middle of torch's schedule, the others would wait for it. So after an exception, the
rank sends zeros, and at the end of each step the ranks exchange whether one has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from intarsia.pipeline.distributed.borders import Borders
from intarsia.pipeline.distributed.placement import is_folded, is_sharded
from intarsia.pipeline.distributed.wire import WiredStage, Wiring, wire_spec
from intarsia.pipeline.gpipe.keyed_random import RandomKey, using_key
from intarsia.pipeline.stages.signature import TensorSpec
from intarsia.tracing import traced

# Before 2.13, torch's separate pass for weights adds the gradients of several outputs of a node as if they
# were one. There, the whole backward pass runs in place of the pass for inputs.
SPLITS_BACKWARD = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)


@dataclass
class Failure:
    """The first exception of a step on this rank, and where it was raised."""

    error: Exception | None = None
    where: str = ""

    def note(self, error: Exception, where: str) -> None:
        """Store an exception, unless there is an earlier one."""
        if self.error is not None:
            return
        # torch wraps the exception of a backward pass; its cause is the user's exception.
        cause = error.__cause__ if str(error).lstrip().startswith("Failed to run stage") else None
        self.error, self.where = cause if isinstance(cause, Exception) else error, where
        self.error.add_note(f"in {where}")


@dataclass
class ScheduleRun:
    """A schedule that is ready to step, and the results of its last step."""

    schedule: Any
    failure: Failure
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)  # of the last stage, by micro-batch
    used: set[int] = field(default_factory=set)  # the outputs of the last stage that have a gradient
    key: RandomKey | None = None  # of the first micro-batch of this step

    def step(
        self, inputs: Sequence[Tensor], options: Mapping[str, Any], key: RandomKey
    ) -> list[tuple[Tensor, ...]]:
        """Run all micro-batches. Returns the outputs of the last stage. A failure is stored, not raised."""
        self.key = key
        self.failure.error = None
        self.outputs.clear()
        self.used.clear()
        self.schedule.step(*inputs, **options)
        return list(self.outputs)


class RefusedRun(ScheduleRun):
    """A run that could not be built: a step does nothing, and its failure is raised at the end."""

    def step(
        self, inputs: Sequence[Tensor], options: Mapping[str, Any], key: RandomKey
    ) -> list[tuple[Tensor, ...]]:
        """No outputs."""
        return []


@dataclass(frozen=True)
class RunPlan:
    """The parts of a schedule: stages by number, borders, and how to run them."""

    schedule_class: Any
    parts: Mapping[int, nn.Module]  # this rank's stages
    borders: Borders
    axis: Callable[[TensorSpec], int | None]  # the batch axis of an input
    n_microbatches: int
    recompute: frozenset[int]
    device: torch.device
    group: dist.ProcessGroup | None


def build_run(
    plan: RunPlan, lengths: Mapping[str, int], loss: Callable[[Sequence[Tensor], int], Tensor] | None
) -> ScheduleRun:
    """torch's schedule for micro-batches of these lengths; with `loss`, its step trains."""
    failure = Failure()
    run = ScheduleRun(None, failure)
    stages = [_pipeline_stage(plan, i, lengths, run) for i in plan.parts]
    if is_folded(plan.schedule_class):
        # Before 2.13, torch first sends a message between neighbours. In a folded schedule, a rank would send
        # to itself, which gloo refuses. The connections are open already (see `connect`).
        for stage in stages:
            if hasattr(stage, "_get_init_p2p_neighbors_ops"):
                stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
    single = issubclass(plan.schedule_class, schedules.PipelineScheduleSingle)
    run.schedule = plan.schedule_class(
        stages[0] if single else stages,
        n_microbatches=plan.n_microbatches,
        loss_fn=None if loss is None else _guarded_loss(loss, failure),
        # torch would divide a tied parameter's gradient once for each stage, and earlier gradients too. The
        # loss is scaled instead.
        scale_grads=False,
    )
    return run


def _pipeline_stage(plan: RunPlan, i: int, lengths: Mapping[str, int], run: ScheduleRun) -> PipelineStage:
    takes, gives = plan.borders[i]
    count = len(plan.borders)
    first, last = i == 0, i == count - 1
    axes = [plan.axis(s) if first else 0 for s in takes]  # type: ignore[arg-type]
    wiring = Wiring(takes, gives, axes, lengths, first, last)  # type: ignore[arg-type]
    wired = WiredStage(plan.parts[i], wiring, recompute=i in plan.recompute, used=run.used)
    inputs = [
        _plain(s, lengths, a) if first else wire_spec(s, lengths) for s, a in zip(takes, axes, strict=True)
    ]
    outputs = [_plain(s, lengths, 0 if s.shape else None) if last else wire_spec(s, lengths) for s in gives]  # type: ignore[union-attr]
    return _GuardedStage(
        _Guarded(wired, i, plan.device, run, last),
        i,
        count,
        plan.device,
        input_args=tuple(inputs),
        output_args=tuple(outputs),
        group=plan.group,
        dw_builder=None if _splits_backward(plan, i) else _nothing_left,
    )


def _splits_backward(plan: RunPlan, i: int) -> bool:
    """Whether the gradients of a stage's weights can run after those of its inputs, in a pass of their own.

    A recomputed stage would run again for every group of weights. torch's pass for weights runs a part of the
    graph twice if a weight has several uses (ALBERT's layers). FSDP2 reduces gradients at the end of a
    backward pass.
    """
    part = plan.parts[i]
    whole = i in plan.recompute or getattr(part, "reuses_weights", False) or is_sharded(part)
    return SPLITS_BACKWARD and not whole


class _Guarded(nn.Module):
    """A stage that stores an exception and returns zeros, so that no rank waits; the step then fails."""

    def __init__(
        self, wired: WiredStage, index: int, device: torch.device, run: ScheduleRun, last: bool
    ) -> None:
        super().__init__()
        self.wired, self.index, self.device, self.run, self.last = wired, index, device, run, last

    def forward(self, *wires: Tensor) -> tuple[Tensor, ...]:
        """The wires of the border after the stage."""
        outputs: tuple[Tensor, ...] | None = None
        if self.run.failure.error is None:
            try:
                outputs = self.wired(*wires)
            except Exception as error:
                self.run.failure.note(error, f"the forward pass of stage {self.index}")
        if outputs is None:
            outputs = self.wired.empty_outputs(self.device)
        if self.last:
            self.run.outputs.append(tuple(o.detach() for o in outputs))
        return outputs


class _GuardedStage(PipelineStage):
    """torch's stage, whose backward pass also continues with zeros after an exception."""

    submod: _Guarded

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a micro-batch, with random numbers by its key."""
        key = self.submod.run.key
        with using_key(None if key is None else key.of(key.micro_batch + fwd_chunk_id)):
            return self._traced("", fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a micro-batch, or of its inputs alone."""
        if not self.has_backward:
            return
        inputs = self.fwd_cache[bwd_chunk_id][1]
        failure = self.submod.run.failure
        if failure.error is None:
            try:
                self._traced(", backward", bwd_chunk_id, super().backward_one_chunk, *args, **kwargs)
                return
            except Exception as error:
                failure.note(error, f"the backward pass of stage {self.stage_index}")
        self.fwd_cache.pop(bwd_chunk_id, None)
        zeros = [torch.zeros_like(x) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]
        self.bwd_cache[bwd_chunk_id] = tuple(zeros)
        self.dw_runner[bwd_chunk_id] = _nothing_left()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The gradients of the weights."""
        failure = self.submod.run.failure
        if failure.error is None:
            try:
                weights = super().backward_weight_one_chunk
                self._traced(", weight gradients", bwd_chunk_id, weights, *args, **kwargs)
                return
            except Exception as error:
                failure.note(error, f"the backward pass of the weights of stage {self.stage_index}")
        self.dw_runner.pop(bwd_chunk_id, None)
        self.backward_state.pop(bwd_chunk_id, None)

    def _traced(self, kind: str, chunk: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = f"stage {self.stage_index}, micro-batch {chunk}{kind}"
        return traced(name, f"stage {self.stage_index}", run, chunk, *args, **kwargs)

    # In a folded schedule, neighbouring stages of one rank exchange gradients by these two methods. torch
    # calls them without a loss too, and then its own methods assert that there is a backward pass.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for the previous stage on this rank; empty without a backward pass."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of the next stage on this rank; no effect without a backward pass."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _guarded_loss(
    loss: Callable[[Sequence[Tensor], int], Tensor], failure: Failure
) -> Callable[[Any, Tensor], Tensor]:
    def guarded(outputs: Any, index: Tensor) -> Tensor:
        leaves = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if failure.error is None:
            try:
                return loss(leaves, int(index))
            except Exception as error:
                failure.note(error, f"the loss of micro-batch {int(index)}")
        return torch.stack([o.float().sum() * 0 for o in leaves if o.requires_grad]).sum()

    return guarded


def _plain(spec: TensorSpec | str, lengths: Mapping[str, int], axis: int | None) -> Tensor:
    """An empty input or output with the batch dimension in front, or with a new one if it has none."""
    assert isinstance(spec, TensorSpec)
    empty = torch.empty(spec.sizes(lengths), dtype=spec.dtype, device="meta")
    return empty.unsqueeze(0) if axis is None else empty.movedim(axis, 0).contiguous()


def _nothing_left() -> Callable[..., None]:
    return lambda: None

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

from intarsia.errors import PipelineError
from intarsia.pipeline.distributed.borders import BorderForm, Borders
from intarsia.pipeline.distributed.placement import is_folded, is_sharded
from intarsia.pipeline.distributed.wire import Alias, Enter, Exit, wire_spec
from intarsia.pipeline.gpipe.keyed_random import RandomKey, using_key
from intarsia.pipeline.stages.program import recomputed
from intarsia.pipeline.stages.signature import TensorSpec, from_front
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
        if self.schedule is None:  # it could not be built: its failure is raised at the end of the step
            return []
        self.key = key
        self.failure.error = None
        self.outputs.clear()
        self.used.clear()
        self.schedule.step(*inputs, **options)
        return list(self.outputs)


@dataclass(frozen=True)
class RunPlan:
    """The parts of a schedule: stages by number, borders, and how to run them."""

    schedule_class: Any
    parts: Mapping[int, nn.Module]  # this rank's stages
    borders: Borders
    forms: Sequence[BorderForm]  # of the borders between stages of modules; empty for stages of the graph
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
    wired = WiredStage(plan, i, lengths, run)
    inputs = [
        _plain(s, lengths, a) if wired.first else wire_spec(s, lengths)
        for s, a in zip(takes, wired.axes, strict=True)
    ]
    outputs = [
        _plain(s, lengths, 0 if s.shape else None) if wired.last else wire_spec(s, lengths)  # type: ignore[union-attr]
        for s in gives
    ]
    return _GuardedStage(
        wired,
        i,
        len(plan.borders),
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


class WiredStage(nn.Module):
    """A stage between wires. The first stage takes plain tensors, and the last stage returns them.

    The dtypes and shapes of outputs must be those that the ranks agreed on. An exception is stored, and zeros
    are returned, so that no rank waits; the step then fails. If the stage is recomputed, only the inputs of a
    micro-batch are kept, and the stage runs again in its backward pass.
    """

    def __init__(self, plan: RunPlan, index: int, lengths: Mapping[str, int], run: ScheduleRun) -> None:
        super().__init__()
        takes, gives = plan.borders[index]
        self.stage, self.index, self.run, self.device = plan.parts[index], index, run, plan.device
        self.forms = plan.forms[index : index + 2]
        self.recompute: bool = index in plan.recompute
        self.first, self.last = index == 0, index == len(plan.borders) - 1
        # The batch axis of each input; None for an input that is not divided.
        self.axes = [plan.axis(s) if self.first else 0 for s in takes]  # type: ignore[arg-type]
        self.dtypes: tuple[Any, ...] = tuple(s.dtype for s in takes)  # type: ignore[union-attr]
        self.gives: list[tuple[Any, tuple[int, ...]]] = [(s, s.sizes(lengths)) for s in gives]  # type: ignore[union-attr]

    def forward(self, *wires: Tensor) -> tuple[Tensor, ...]:
        """The wires of the border after the stage, from those before it."""
        outputs: tuple[Tensor, ...] | None = None
        if self.run.failure.error is None:
            try:
                outputs = self._computed(wires)
            except Exception as error:
                self.run.failure.note(error, f"the forward pass of stage {self.index}")
        if outputs is None:
            outputs = self._zeros()
        if self.last:
            self.run.outputs.append(tuple(o.detach() for o in outputs))
        return outputs

    def _computed(self, wires: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values: Sequence[Tensor] = (
            from_front(wires, self.axes) if self.first else Enter.apply(self.dtypes, *wires)  # type: ignore[no-untyped-call]
        )
        again = self.recompute and torch.is_grad_enabled()
        outputs = recomputed(self._stage, *values) if again else self._stage(*values)
        for (spec, shape), output in zip(self.gives, outputs, strict=True):
            if output.dtype != spec.dtype or tuple(output.shape) != shape:
                raise PipelineError(
                    f"{spec.name} is {output.dtype} of shape {tuple(output.shape)}, but the ranks agreed on"
                    f" {spec.dtype} of shape {shape}"
                )
        if self.last:
            # Aliases: torch's runtime detaches the outputs in place, and an output may be an input.
            return tuple(Alias.apply(o, i, self.run.used) for i, o in enumerate(outputs))  # type: ignore[no-untyped-call]
        return self._exit(outputs)

    def _stage(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the border after the stage, from those of the border before it."""
        if not self.forms:
            return tuple(self.stage(*tensors))
        takes, gives = self.forms
        return gives.flatten(self.stage(*takes.unflatten(tensors)))

    def _zeros(self) -> tuple[Tensor, ...]:
        """Zeros with the form of the outputs, for a step that failed here."""
        zeros = [torch.zeros(shape, dtype=spec.dtype, device=self.device) for spec, shape in self.gives]
        if not self.last:
            return self._exit(zeros)
        ones = [z.reshape(1) if z.ndim == 0 else z for z in zeros]
        return tuple(z.requires_grad_(z.is_floating_point() and torch.is_grad_enabled()) for z in ones)

    def _exit(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        anchor = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        return tuple(Exit.apply(anchor, *outputs))  # type: ignore[no-untyped-call]


class _GuardedStage(PipelineStage):
    """torch's stage, whose backward pass also continues with zeros after an exception."""

    submod: WiredStage

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a micro-batch, with random numbers by its key."""
        key = self.submod.run.key
        with using_key(None if key is None else key.of(key.micro_batch + fwd_chunk_id)):
            return self._traced("", fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a micro-batch, or of its inputs alone."""
        if not self.has_backward:
            return
        # What torch keeps of a forward pass: a tuple until torch 2.13, a record of another name in 2.15.
        states = vars(self)["fwd_cache" if "fwd_cache" in vars(self) else "_forward_chunk_states"]
        state = states[bwd_chunk_id]
        inputs = state[1] if isinstance(state, tuple) else state.input_values
        failure = self.submod.run.failure
        if failure.error is None:
            try:
                self._traced(", backward", bwd_chunk_id, super().backward_one_chunk, *args, **kwargs)
                return
            except Exception as error:
                failure.note(error, f"the backward pass of stage {self.stage_index}")
        states.pop(bwd_chunk_id, None)
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

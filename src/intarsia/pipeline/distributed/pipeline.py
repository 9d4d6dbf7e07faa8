"""Stages on several processes, run by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.distributed.batch import bare, divide, divide_target, join
from intarsia.pipeline.distributed.loading import materialise, weights_of
from intarsia.pipeline.distributed.loss import Loss, LossWeight, MicrobatchLoss, Reduction, mean_inside
from intarsia.pipeline.distributed.placement import (
    check_agreement,
    connect,
    default_device,
    placed,
    schedule_class,
    stage_ranks,
)
from intarsia.pipeline.distributed.precision import (
    Borders,
    Precision,
    borders_under_autocast,
    current_precision,
    uncached_autocast,
)
from intarsia.pipeline.distributed.rank_stages import RankStages
from intarsia.pipeline.distributed.saved import is_checkpoint
from intarsia.pipeline.distributed.schedule_run import Failure, RunPlan, ScheduleRun, build_run
from intarsia.pipeline.distributed.wire import wire_spec
from intarsia.pipeline.schedule.schedules import refusal
from intarsia.pipeline.stages.devices import retarget
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.stage import Stage
from intarsia.pipeline.stages.tied import TiedGradients
from intarsia.pipeline.stages.weights import Weights

_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|pair is not connected|NCCL", re.IGNORECASE
)
_PRECISIONS: tuple[Precision, ...] = (None, torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StepResult:
    """What one step gave: on the rank of the last stage, the loss and the outputs; elsewhere None."""

    loss: Tensor | None
    output: Any


class DistributedPipeline(RankStages):
    """One rank's part of a pipeline: its stages, and `step`.

    Made by `Stages.distributed` on every rank, inside an initialised process group. The gradients after
    `step` are the plain model's: of the mean loss over the batch (`reduction="mean"`) or of the sum.
    Parameters held by several ranks begin equal and get the sum of their gradients. A batch of another
    length, or another autocast, makes new buffers; one that micro-batches do not divide is refused on every
    rank before it runs. An exception in one stage is raised on every rank at the end of the step, whose
    gradients then mean nothing: call `zero_grad` before the next.

    Args:
        stages: what `split` gave, on every rank the same cuts.
        schedule: a name of torch's schedules: GPipe, 1F1B, Interleaved1F1B, ZeroBubble, ...
        n_microbatches: how many equal parts a batch is cut into.
        loss_fn: called with the model's answer and the target of a micro-batch.
        loss_weight: from the target of a micro-batch, how much its loss averages over (tokens, say), or
            "equal"; see `MicrobatchLoss` for what is recognised without it.
        reduction: whether the loss of a batch is the mean or the sum over its micro-batches.
        check_loss: whether the loss of the micro-batches is compared with that of the whole batch.
        checkpoint: stages to compute again in the backward pass instead of keeping their activations: all
            (True), none, or some by number.
        device: where this rank's stages live.
        group: the process group of the pipeline's ranks.
        weights: a safetensors file, a folder of shards, or a checkpoint of `save`, from which this rank reads
            its own stages and no others; `Weights(path, ...)` for more. Stages on the meta device need it.
    """

    def __init__(
        self,
        stages: StageSequence,
        schedule: str = "1F1B",
        n_microbatches: int = 8,
        *,
        loss_fn: Loss | None = None,
        loss_weight: LossWeight | None = None,
        reduction: Reduction = "mean",
        check_loss: bool = True,
        checkpoint: bool | Collection[int] = False,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        weights: str | Path | Weights | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise PartitionError(
                "no process group: run under torchrun and call torch.distributed.init_process_group first"
            )
        if n_microbatches < 1:
            raise PartitionError(f"n_microbatches={n_microbatches} must be 1 or more")
        self.signature, self.group, self.n_microbatches = stages.signature, group, n_microbatches
        if n_microbatches > 1:
            self.signature.check_divisible(front=True)
        self.loss = None if loss_fn is None else MicrobatchLoss(loss_fn, loss_weight, reduction, check_loss)
        self.checkpoint = _numbers(checkpoint, len(stages))
        if self.loss is not None and loss_weight is None and n_microbatches > 1:
            _refuse_mean_inside(stages)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device) if device is not None else default_device()
        self.schedule_class = schedule_class(schedule)
        self.stage_ranks = stage_ranks(len(stages), self.world, self.schedule_class)
        reason = refusal(schedule, self.world, n_microbatches)
        if reason is not None:
            raise PartitionError(reason)
        check_agreement(stages, group, self.device)
        connect(self.stage_ranks, group, self.device)
        self._stages = list(stages)
        for stage in self._stages:
            if isinstance(stage, Stage):
                retarget(stage.program, self.device)  # those of other ranks run on fake tensors
        self._borders: Borders = [_border_specs(s) for s in stages]
        held = [i for i, rank in enumerate(self.stage_ranks) if rank == self.rank]
        source = weights_of(weights)
        if source is None:
            stages.check_memory()
        else:
            materialise(stages, source, held, self.device, self._gather)
        parts = {i: placed(stages[i], self.device) for i in held}
        super().__init__(parts, stages.keys, stages.tied, self.stage_ranks, group, self.device)
        if source is not None and is_checkpoint(source.path):
            self.load(source.path)
        self._tied = TiedGradients(stages.tied, self.stage_ranks, parts, group)
        self._built: dict[Any, tuple[Borders, ScheduleRun]] = {}
        # Every border is checked now, so that nothing is refused in the middle of a step.
        for takes, _ in self._borders[1:]:
            for spec in takes:
                wire_spec(spec, self.signature.example)

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return 0 in self.parts

    @property
    def is_last(self) -> bool:
        """Whether this rank takes the target and gives the loss and the outputs."""
        return len(self._stages) - 1 in self.parts

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Forward and backward over one batch.

        Every rank calls it, all under the same autocast. The first rank must give the model's inputs and the
        last the target (a tensor, or any structure of tensors with the batch in front); other ranks may give
        them or not.
        """
        if self.loss is None:
            raise PartitionError("step needs loss_fn; without one call infer")
        return self._run(args, kwargs, target, self.loss)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Forward alone over one batch; the outputs, on the rank of the last stage."""
        with torch.no_grad():
            return self._run(args, kwargs, None, None).output

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss: MicrobatchLoss | None
    ) -> StepResult:
        tensors, lengths = self._agree(args, kwargs, target)
        borders, run = self._schedule(loss, lengths)
        losses: list[Tensor] = []
        options: dict[str, Any] = {}
        try:
            if self.is_last and loss is not None:
                loss.begin(divide_target(target, self.n_microbatches))
                options = {"target": torch.arange(self.n_microbatches), "losses": losses}
            with (
                uncached_autocast(self.device),
                nullcontext() if loss is None else self._tied.collecting(),
                _dense_gradients(self.parameters()),
            ):
                chunks = run.step(tensors if self.is_first else (), options)
        except RuntimeError as error:
            if _LOST.search(str(error)):
                raise PipelineError(
                    f"rank {self.rank} lost {self._neighbours()} in the middle of a step: {error}"
                ) from error
            raise
        finally:
            if loss is not None:
                loss.end()
        result = StepResult(None, None)
        if self.is_last and run.failure.error is None:
            try:
                result = self._result(borders, chunks, losses, target, loss)
            except Exception as error:
                run.failure.note(error, "the loss of the whole batch")
        self._raise_together(run.failure)
        return result

    def _result(
        self,
        borders: Borders,
        chunks: Sequence[Sequence[Tensor]],
        losses: Sequence[Tensor],
        target: Any,
        loss: MicrobatchLoss | None,
    ) -> StepResult:
        specs: Any = borders[-1][1]
        output = join(self.signature, specs, chunks)
        total = torch.stack([x.detach() for x in losses]).sum() if losses else None
        if loss is not None and total is not None and all(map(self.signature.splits, specs)):
            with uncached_autocast(self.device):
                loss.compare(output, target, total)
        return StepResult(total, output)

    def _raise_together(self, failure: Failure) -> None:
        """Raise on every rank what any rank failed with."""
        mine = torch.tensor([int(failure.error is not None)], device=self.device)
        flags = self._gather(mine)
        failed = [r for r, flag in enumerate(flags) if int(flag)]
        if not failed:
            return
        words = [f"{type(failure.error).__name__} in {failure.where}: {failure.error}"]
        shared: list[Any] = [None] * self.world
        dist.all_gather_object(shared, words, group=self.group)
        if failure.error is not None:
            raise failure.error
        raise PipelineError(f"rank {failed[0]} failed with {shared[failed[0]][0]}")

    def _agree(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[list[Tensor], dict[str, int]]:
        """Let every rank know the lengths of this batch, or that some rank refused it."""
        names = sorted(self.signature.example)
        tensors: list[Tensor] = []
        lengths: dict[str, int] = {}
        refusal = ""
        try:
            if self.is_first:
                given = self.signature.flatten(args, kwargs)
                tensors, lengths = divide(self.signature, given, self.n_microbatches, self.device)
            if self.is_last and target is not None:
                divide_target(target, self.n_microbatches)
        except InputError as error:
            refusal = str(error)
        precision = _PRECISIONS.index(current_precision(self.device))
        message = [int(bool(refusal)), precision, *(lengths.get(n, -1) for n in names)]
        gathered = self._gather(torch.tensor(message, device=self.device))
        refused = [r for r, t in enumerate(gathered) if int(t[0])]
        if refusal:
            raise InputError(refusal)
        if refused:
            raise InputError(f"rank {refused[0]} refused this batch; its own error says why")
        for rank, numbers in enumerate(gathered):
            if int(numbers[1]) != precision:
                mine, other = (_autocast(_PRECISIONS[p]) for p in (precision, int(numbers[1])))
                raise InputError(f"rank {self.rank} steps {mine}, but rank {rank} {other}")
        first = gathered[self.stage_ranks[0]]
        return tensors, {n: int(v) for n, v in zip(names, first[2:], strict=True)}

    def _gather(self, mine: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        try:
            dist.all_gather(gathered, mine, group=self.group)
        except RuntimeError as error:
            others = " or ".join(f"rank {r}" for r in range(self.world) if r != self.rank)
            raise PipelineError(f"rank {self.rank} lost {others} between steps: {error}") from error
        return gathered

    def _neighbours(self) -> str:
        """The ranks this one exchanges values with; a connection that closed leads to one of them."""
        near = {
            self.stage_ranks[s] for i in self.parts for s in (i - 1, i + 1) if s in range(len(self._stages))
        }
        return " or ".join(f"rank {r}" for r in sorted(near - {self.rank})) or "another rank"

    def _schedule(
        self, loss: MicrobatchLoss | None, lengths: Mapping[str, int]
    ) -> tuple[Borders, ScheduleRun]:
        """The borders and torch's schedule for such batches; made once for each kind."""
        key = (loss is not None, current_precision(self.device), tuple(sorted(lengths.items())))
        if key not in self._built:
            self._built.clear()  # the buffers of another length are not kept
            borders = borders_under_autocast(self._stages, self._borders, lengths, self.device)
            plan = RunPlan(
                self.schedule_class,
                self.parts,
                borders,
                self.signature.splits,
                self.n_microbatches,
                self.checkpoint,
                self.device,
                self.group,
            )
            specs: Any = borders[-1][1]

            def scaled(outputs: Sequence[Tensor], index: int) -> Tensor:
                assert loss is not None
                return loss(self.signature.unflatten(bare(outputs, specs)), index)

            self._built[key] = borders, build_run(plan, lengths, None if loss is None else scaled)
        return self._built[key]


def _numbers(checkpoint: bool | Collection[int], count: int) -> frozenset[int]:
    chosen = range(count) if checkpoint is True else () if checkpoint is False else checkpoint
    wrong = [i for i in chosen if i not in range(count)]
    if wrong:
        raise PartitionError(f"checkpoint names stage {wrong[0]}; there are {count}")
    return frozenset(chosen)


def _refuse_mean_inside(stages: StageSequence) -> None:
    node = next((n for n in map(mean_inside, stages) if n is not None), None)
    if node is not None:
        raise PartitionError(
            f"the model computes a mean over tokens itself ({node}), and micro-batches may average over"
            " different numbers of them: give loss_weight=, a function of a micro-batch's target (with"
            " target=labels, say lambda labels: (labels != -100).sum()), or loss_weight='equal'"
        )


def _autocast(precision: Precision) -> str:
    return "without autocast" if precision is None else f"under autocast to {precision}"


@contextmanager
def _dense_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients with memory of their own: torch's split backward adds in place to expanded views."""
    hooks = [p.register_hook(Tensor.contiguous) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _border_specs(stage: nn.Module) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    form = getattr(stage, "form", None)
    if form is None:
        raise PartitionError(
            "stages cut along the module tree run in one process only; see stages.report.reason"
        )
    return form.takes, form.gives

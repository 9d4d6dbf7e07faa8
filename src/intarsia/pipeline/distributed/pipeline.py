"""Stages on several processes, run by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError, PipelineError
from intarsia.pipeline.distributed.batch import AgreedBatch, Terms, agree, first_part, join, real_part
from intarsia.pipeline.distributed.borders import (
    BorderForm,
    Borders,
    border_specs,
    borders_in_precision,
    current_precision,
    find_forms,
    refuse_autocast,
    tree_borders,
    uncached_autocast,
)
from intarsia.pipeline.distributed.loss import (
    NO_TARGET,
    MicrobatchLoss,
    UnusedParameters,
    own_scale,
    share_overflow,
)
from intarsia.pipeline.distributed.options import DistributedKeywords, DistributedOptions
from intarsia.pipeline.distributed.placement import (
    check_agreement,
    check_plan,
    connect,
    default_device,
    parallelize_stages,
    placed,
    recomputed_stages,
    refuse_compiled,
    refuse_mean_inside,
    refuse_shared_statistics,
    schedule_class,
    shard_stages,
    stage_ranks,
)
from intarsia.pipeline.distributed.rank_stages import (
    RankStages,
    note_trainers,
    refuse_old_copies,
    watch_optimizers,
)
from intarsia.pipeline.distributed.saved import is_checkpoint, materialise, weights_of
from intarsia.pipeline.distributed.schedule_run import Failure, RunPlan, ScheduleRun, build_run
from intarsia.pipeline.distributed.wire import wire_spec
from intarsia.pipeline.distributed.world import World, together
from intarsia.pipeline.gpipe.keyed_random import RandomKey
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import CallSignature
from intarsia.pipeline.stages.stage import defer_statistics
from intarsia.pipeline.stages.tied import TiedGradients
from intarsia.pipeline.stages.tree_stage import CompiledStage


@dataclass(frozen=True)
class StepResult:
    """The result of one step: the loss and the outputs on the rank of the last stage; None on others."""

    loss: Tensor | None
    output: Any


class DistributedPipeline(RankStages):
    """One rank's part of a pipeline: its stages, and `step`.

    `Stages.distributed` creates it on every rank, inside an initialized process group. After `step`, the
    gradients are those of the plain model for the mean loss over the batch (`reduction="mean"`), or for the
    sum. Parameters that are on several ranks begin equal, and get the sum of their gradients. If a stage
    raises an exception, every rank raises it at the end of the step. The gradients are then invalid: call
    `zero_grad` before the next step.

    Args:
        stages: the result of `split`, with the same cuts on every rank.
        schedule: a schedule of torch (GPipe, 1F1B, Interleaved1F1B, ZeroBubble, ...) or of `define_schedule`.
        n_microbatches: the number of parts of a batch. The last part may be shorter.
        options: those of `DistributedOptions`, by name (`loss_fn`, `checkpoint`, `mesh`, ...).
    """

    def __init__(
        self,
        stages: StageSequence,
        schedule: str = "1F1B",
        n_microbatches: int = 8,
        **options: Unpack[DistributedKeywords],
    ) -> None:
        chosen = DistributedOptions.of(**options)
        if not dist.is_initialized():
            raise PartitionError(
                "no process group: run under torchrun and call torch.distributed.init_process_group first"
            )
        if n_microbatches < 1:
            raise PartitionError(f"n_microbatches={n_microbatches} must be 1 or more")
        self.signature: CallSignature = stages.signature
        self.n_microbatches: int = n_microbatches
        if n_microbatches > 1:
            self.signature.check_divisible()
        self.loss: MicrobatchLoss | None = chosen.loss
        self.checkpoint: frozenset[int] = recomputed_stages(chosen.checkpoint, stages)
        if self.loss is not None and chosen.loss_weight is None and n_microbatches > 1:
            refuse_mean_inside(stages)
        world = World(chosen.group, chosen.mesh)
        check_plan(stages, world.tensor, chosen.tensor_plan)
        self.device: torch.device = default_device() if chosen.device is None else torch.device(chosen.device)
        self.schedule_class: Any = schedule_class(schedule, world.size, n_microbatches)
        self.stage_ranks: list[int] = stage_ranks(len(stages), world.size, self.schedule_class)
        check_agreement(stages, schedule, n_microbatches, world.gather_objects)
        connect(self.stage_ranks, world.pipeline, self.device)
        self._stages = list(stages)
        refuse_compiled(stages, self.loss is not None)
        self._borders: Borders = [border_specs(s) for s in stages]
        refuse_shared_statistics(stages, self.stage_ranks)
        held = [i for i, rank in enumerate(self.stage_ranks) if rank == world.rank]
        source = weights_of(chosen.weights)
        if source is None:
            stages.check_memory()
        else:
            materialise(stages, source, held, self.device, world)
        parts = {i: placed(stages[i], self.device) for i in held}
        super().__init__(parts, stages, self.stage_ranks, world, self.device)
        if source is not None and is_checkpoint(source.path):
            self.load(source.path, strict=source.strict)
        self.seed: int = world.agreed_seed(chosen.seed)
        self.steps: int = 0
        self._inferences = 0
        self._is_checked = False  # whether this pipeline trains and has looked for old copies
        self._deferred = defer_statistics(parts.values(), chosen.deferred_batch_norm)
        self._tied = TiedGradients(stages.tied, self.stage_ranks, parts, world.pipeline)
        open_parts = [part for part in parts.values() if not isinstance(part, CompiledStage)]
        world.begin_equal([t for part in open_parts for t in (*part.parameters(), *part.buffers())])
        if world.shard is not None:
            if chosen.scaler is not None:
                raise PartitionError("scaler= with a mesh that shards stages is not handled; use bfloat16")
            with together(world.everyone, "cannot shard its stages"):
                shard_stages(parts, stages, world.shard)
        if world.tensor is not None and chosen.tensor_plan is not None:
            if chosen.scaler is not None:
                raise PartitionError("scaler= with tensor_plan= is not handled; use bfloat16")
            with together(world.everyone, "cannot divide its stages"):
                parallelize_stages(parts, world.tensor, chosen.tensor_plan)
        self._statistics = [b for s in parts.values() if s.writes for b in s.buffers()]
        first, last = self.stage_ranks[0], self.stage_ranks[-1]
        self._terms = Terms(
            self.signature,
            world,
            n_microbatches,
            self.device,
            first,
            last,
            chosen.target_axis,
            stages.why_not_padded,
        )
        self.scaler: torch.amp.GradScaler | None = chosen.scaler
        self._unused = UnusedParameters(self._stages)
        if self.loss is not None and len(set(self.stage_ranks)) > 1:
            watch_optimizers(self.parameters())
        self._sizes: list[int] = []  # of the micro-batches of this step
        self._built: dict[Any, tuple[Borders, ScheduleRun]] = {}
        self._forms: dict[Any, list[BorderForm]] = {}
        # Every border is checked here, so that no step fails for it.
        for takes, _ in self._borders[1:]:
            for spec in takes:
                wire_spec(spec, self.signature.example)

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return 0 in self.parts

    @property
    def is_last(self) -> bool:
        """Whether this rank takes the target and returns the loss and the outputs."""
        return len(self._stages) - 1 in self.parts

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run forward and backward over one batch.

        Every rank calls it, all under the same autocast. The first rank passes the model's inputs, and the
        last rank the target (a tensor, or a structure of tensors with a batch dimension). Other ranks may
        pass them too.
        """
        if self.loss is None:
            raise PartitionError("step needs loss_fn; without it, call infer")
        return self._run(args, kwargs, target, self.loss)

    def shard(self, batch: Any) -> Any:
        """This replica's part of a batch, whose tensors are cut along their first dimension.

        For a `DistributedSampler`, use `world.replica` and `world.replicas`.
        """
        return pytree.tree_map_only(Tensor, self.world.share, batch)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward over one batch. Returns the outputs on the rank of the last stage."""
        with torch.no_grad():
            return self._run(args, kwargs, None, None).output

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss: MicrobatchLoss | None
    ) -> StepResult:
        self._refuse_old_copies()
        own = list(self.parameters())
        scale_of = partial(own_scale, self.scaler, own, self.device)
        batch = agree(self._terms, args, kwargs, target, loss, scale_of)
        # FSDP2 averages the gradients of its replicas; other replicas sum them.
        scale = batch.scale * (1 if self.world.shard is None else self.world.replicas)
        self._sizes = batch.sizes
        borders, run = self._schedule(loss, batch)
        for norm in self._deferred:  # after the first run across the borders, which counts as no micro-batch
            norm.begin(self.n_microbatches)
        fresh = [p for p in own if p.requires_grad and p.grad is None]
        if loss is not None:
            self.world.begin_equal(self._statistics)  # like DistributedDataParallel
        losses: list[Tensor] = []
        options: dict[str, Any] = {}
        if self.is_last and loss is not None:
            loss.begin(batch.targets, batch.weights, batch.total, scale)
            options = {"target": torch.arange(self.n_microbatches), "losses": losses}
        with (
            self.world.watched("in the middle of a step"),
            uncached_autocast(self.device),
            nullcontext() if loss is None else self.world.summing(own),
            nullcontext() if loss is None else self._tied.collecting(),
            _dense_gradients(own),
        ):
            chunks = run.step(batch.tensors if self.is_first else (), options, self._key(loss is not None))
        result = StepResult(None, None)
        if self.is_last and run.failure.error is None:
            try:
                if loss is not None and not run.used:
                    raise PipelineError(
                        "the loss has no gradient: it does not depend on the model's outputs, or all"
                        " parameters are frozen"
                    )
                whole = NO_TARGET if target is None else target
                result = self._result(borders, chunks, [x.detach() / scale for x in losses], whole, loss)
            except Exception as error:
                run.failure.note(error, "the loss of the whole batch")
        if loss is not None:
            loss.end()
        used = self._raise_together(run)
        if loss is None:
            self._inferences += 1
            return result
        self.steps += 1
        self._unused.forget(fresh, used)
        if batch.is_scaled:
            share_overflow(own, self.world, self.device)
        if result.loss is not None:
            with self.world.watched("in the middle of a step"):
                self.world.sum_over_replicas(result.loss)
        return result

    def _refuse_old_copies(self) -> None:
        """Raise if another pipeline has trained weights of this one. One that trains looks only once."""
        if self._is_checked:
            return
        refuse_old_copies(self._stages, self.parts.values(), self.world)
        if self.loss is not None:
            note_trainers(self._stages, self.stage_ranks, self.world)
            self._is_checked = True

    def _key(self, training: bool) -> RandomKey:
        """The key of this replica's first micro-batch. Micro-batches are numbered over all replicas."""
        seed = self.seed if training else RandomKey(self.seed).at(f"inference {self._inferences}")
        return RandomKey(seed, self.steps, self.world.replica * self.n_microbatches)

    def _result(
        self,
        borders: Borders,
        chunks: Sequence[Sequence[Tensor]],
        losses: Sequence[Tensor],
        target: Any,
        loss: MicrobatchLoss | None,
    ) -> StepResult:
        specs: Any = borders[-1][1]
        output = join(self.signature, specs, chunks, sum(self._sizes))
        total = torch.stack(list(losses)).sum() if losses else None
        if loss is not None and total is not None and all(map(self.signature.splits, specs)):
            with uncached_autocast(self.device):
                loss.compare(output, target, total)
        return StepResult(total, output)

    def _raise_together(self, run: ScheduleRun) -> list[bool]:
        """Raise on every rank if one failed. Returns for each output whether any replica's loss uses it."""
        failure, count = run.failure, len(self._borders[-1][1])
        mine = [failure.error is not None, *(i in run.used for i in range(count))]
        flags = self.world.gather(torch.tensor(mine, dtype=torch.int64, device=self.device))
        failed = [r for r, flag in flags.items() if int(flag[0])]
        if not failed:
            return [any(int(flag[1 + i]) for flag in flags.values()) for i in range(count)]
        words = f"{type(failure.error).__name__} in {failure.where}: {failure.error}"
        shared = self.world.gather_objects(words)
        if failure.error is not None:
            raise failure.error
        raise PipelineError(f"rank {failed[0]} failed with {shared[failed[0]]}")

    def _schedule(self, loss: MicrobatchLoss | None, batch: AgreedBatch) -> tuple[Borders, ScheduleRun]:
        """The borders and torch's schedule for batches of this length and precision; the last is cached."""
        precision = current_precision(self.device)
        kind = (precision, tuple(sorted(batch.lengths.items())))
        key = (loss is not None, *kind)
        if key in self._built:
            return self._built[key]
        self._built.clear()  # frees the buffers for another length
        refuse_autocast(self._stages, self.device)
        borders, forms = self._borders, list[BorderForm]()
        try:
            if any(getattr(stage, "form", None) is None for stage in self._stages):  # cut along modules
                forms = self._find_forms(kind, batch)
                borders = tree_borders(forms, self.signature, batch.lengths)
            elif precision is not None:  # the dtypes are the same for all lengths
                borders = borders_in_precision(borders, self._find_forms(precision, batch))
        except Exception as error:  # other replicas do not know of it: all raise at the end of the step
            return self._borders, ScheduleRun(None, Failure(error, "the first run across the borders"))
        plan = RunPlan(
            self.schedule_class,
            self.parts,
            borders,
            forms,
            self.signature.axis,
            self.n_microbatches,
            self.checkpoint,
            self.device,
            self.world.pipeline,
        )
        specs: Any = borders[-1][1]

        def scaled(outputs: Sequence[Tensor], index: int) -> Tensor:
            assert loss is not None
            real = real_part(self.signature, specs, outputs, self._sizes[index])
            return loss(self.signature.unflatten(real), index)

        self._built[key] = borders, build_run(plan, batch.lengths, None if loss is None else scaled)
        return self._built[key]

    def _find_forms(self, kind: Any, batch: AgreedBatch) -> list[BorderForm]:
        """The forms of the borders in a run, which is done once for each `kind`."""
        if kind not in self._forms:
            inputs: list[Tensor] = []
            if self.is_first:
                inputs = first_part(self.signature, batch.tensors, self.n_microbatches)
            with self.world.watched("between steps"):
                self._forms[kind] = find_forms(self.parts, self.stage_ranks, inputs, self.world, self.device)
        return self._forms[kind]


@contextmanager
def _dense_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make gradients contiguous: torch's split backward adds in place, which fails for expanded views."""
    hooks = [p.register_hook(_contiguous) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _contiguous(gradient: Tensor) -> Tensor:
    return gradient if gradient.is_sparse else gradient.contiguous()

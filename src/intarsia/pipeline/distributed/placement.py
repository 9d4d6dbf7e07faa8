"""The placement of stages on ranks: torch's schedules by name, the rank of every stage, and early checks.

A stage may also be divided among ranks, by torch's FSDP2 (`fully_shard`) or its tensor parallel plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from intarsia.errors import PartitionError, near_names
from intarsia.pipeline.schedules import (
    SCHEDULES,
    TORCH_ONLY,
    Action,
    Definition,
    find_schedule,
    rank_of,
    schedule,
)
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.stage import Stage, recompute_modules
from intarsia.pipeline.stages.tied import global_rank
from intarsia.pipeline.stages.tree_stage import CompiledStage, TreeStage

# Torch's runtime takes an order of passes and adds sends and receives. It has no public name. Torch's own
# schedules are subclasses of it (2.11 to 2.13), and tests/pipeline/test_new_schedule.py runs one of ours.
_RUNTIME, _LOWER, _ACTION, _PASS = (
    "_PipelineScheduleRuntime",
    "_prepare_schedule_with_comms",
    "_Action",
    "_ComputationType",
)


def schedule_class(name: str, ranks: int, microbatches: int) -> Any:
    """Torch's class for a schedule: the class of this name, or torch's runtime with our order of slots.

    Raises PartitionError if there is no such schedule, or if it cannot run with these numbers.
    """
    definition = find_schedule(name)
    if definition is not None and (reason := definition.refusal(ranks, microbatches)) is not None:
        raise PartitionError(reason)
    if definition is not None and hasattr(schedules, definition.torch):
        return getattr(schedules, definition.torch)
    if definition is not None and definition.order is not None:
        return _in_order_of(definition)
    try:
        return schedules.get_schedule_class(name)
    except ValueError as error:
        names = ", ".join([*SCHEDULES, *TORCH_ONLY])
        raise PartitionError(f"schedule={name!r} is none of {names}, nor one of torch's") from error


def _in_order_of(definition: Definition) -> Any:
    """A schedule class of torch that runs the slots of a definition in order."""
    runtime: Any = getattr(schedules, _RUNTIME, None)
    action: Any = getattr(schedules, _ACTION, None)
    kind: Any = getattr(schedules, _PASS, None)
    if not hasattr(runtime, _LOWER) or action is None or kind is None:
        raise PartitionError(
            f"schedule={definition.name!r} cannot run: torch {torch.__version__} has no {_RUNTIME}.{_LOWER}"
        )
    passes = {
        Action.FORWARD: kind.FORWARD,
        Action.BACKWARD: kind.FULL_BACKWARD,
        Action.INPUT: kind.BACKWARD_INPUT,
        Action.WEIGHT: kind.BACKWARD_WEIGHT,
    }

    class InOrder(runtime):  # type: ignore[misc]
        """Torch's runtime with the slots of a definition."""

        def __init__(self, stages: Sequence[Any], n_microbatches: int, **options: Any) -> None:
            super().__init__(stages, n_microbatches, **options)
            ranks = self.pp_group_size
            plan = schedule(definition.name, ranks, n_microbatches, stages[0].num_stages // ranks)
            self.pipeline_order = {
                rank: [action(s.stage, passes[s.action], s.microbatch) for s in slots]
                for rank, slots in enumerate(plan.ranks)
            }
            getattr(self, _LOWER)(self.pipeline_order)

    InOrder.__name__ = definition.name
    return InOrder


def is_folded(kind: Any) -> bool:
    """Whether the second half of the stages is on the ranks in reverse order."""
    definitions = (*SCHEDULES.values(), *TORCH_ONLY.values())
    return any(d.folded and kind.__name__ in (d.torch, d.name) for d in definitions)


def stage_ranks(stages: int, world: int, kind: Any) -> list[int]:
    """The rank of each stage."""
    if issubclass(kind, schedules.PipelineScheduleSingle):
        if stages != world:
            raise PartitionError(f"{kind.__name__} runs one stage per rank: {stages} stages, {world} ranks")
        return list(range(stages))
    if stages % world:
        raise PartitionError(f"{stages} stages do not divide among {world} ranks")
    folded = is_folded(kind)
    if folded and stages != 2 * world:
        raise PartitionError(f"{kind.__name__} runs two stages per rank: {stages} stages, {world} ranks")
    return [rank_of(i, world, folded) for i in range(stages)]


def placed(stage: nn.Module, device: torch.device) -> nn.Module:
    """The stage, moved to a device; a compiled stage stays on the device that it was compiled for."""
    if isinstance(stage, CompiledStage):
        return stage
    return stage.to_device(device) if isinstance(stage, Stage) else stage.to(device)


def default_device() -> torch.device:
    """The device of tensors for the process group's backend."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_agreement(
    stages: StageSequence, schedule: str, n_microbatches: int, gather: Callable[[Any], Mapping[int, Any]]
) -> None:
    """Raise PartitionError if ranks have different cuts, schedules or numbers of micro-batches.

    `gather` returns the values of all ranks, by rank.
    """
    me, cuts = dist.get_rank(), hashlib.sha256("\n".join(map(_cut, stages)).encode()).hexdigest()
    for rank, (other_cuts, other_schedule, count) in gather((cuts, schedule, n_microbatches)).items():
        if other_cuts != cuts:
            raise PartitionError(
                f"rank {rank} has other cuts than rank {me}, since measured times differ between processes;"
                " split(..., agree=True) uses the cuts of rank 0 on every rank"
            )
        if other_schedule != schedule:
            raise PartitionError(
                f"rank {me} has schedule={schedule!r}, and rank {rank} schedule={other_schedule!r}"
            )
        if count != n_microbatches:
            raise PartitionError(
                f"rank {me} has n_microbatches={n_microbatches}, and rank {rank} n_microbatches={count}"
            )


def _cut(stage: nn.Module) -> str:
    """A text that is equal on ranks with equal cuts; their engines may differ."""
    form = getattr(stage, "form", None)
    if form is not None:
        return str(form.nodes)
    return f"{stage.input_names} {stage.output_names}" if isinstance(stage, CompiledStage) else str(stage)


def connect(stage_ranks: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Open the connections between neighbours one by one.

    Some versions of gloo fail if both ends of a new connection send at the same time.
    """
    rank = dist.get_rank(group)
    for a, b in sorted({(min(p), max(p)) for p in pairwise(stage_ranks) if p[0] != p[1]}):
        if rank not in (a, b):
            continue
        message = torch.zeros(1, device=device)
        for sender in (a, b):
            other = global_rank(b if rank == a else a, group)
            if rank == sender:
                dist.send(message, other, group=group)
            else:
                dist.recv(message, other, group=group)


def recomputed_stages(checkpoint: bool | Collection[int | str], stages: StageSequence) -> frozenset[int]:
    """The stages to recompute in the backward pass; named modules are marked in their stages."""
    if isinstance(checkpoint, str) or not isinstance(checkpoint, bool | Collection):
        raise PartitionError(
            f"checkpoint={checkpoint!r} must be True, False, or a list of"
            " numbers of stages and names of modules"
        )
    chosen = range(len(stages)) if checkpoint is True else () if checkpoint is False else checkpoint
    others = [one for one in chosen if not isinstance(one, int | str)]
    if others:
        raise PartitionError(f"checkpoint names {others[0]!r}, which is neither a stage nor a module")
    numbers = [i for i in chosen if isinstance(i, int)]
    wrong = [i for i in numbers if i not in range(len(stages))]
    if wrong:
        raise PartitionError(f"checkpoint names stage {wrong[0]}; there are {len(stages)}")
    names = [name for name in chosen if isinstance(name, str)]
    if names:
        recompute_modules(stages, names)
    return frozenset(numbers)


def refuse_shared_statistics(stages: StageSequence, ranks: Sequence[int]) -> None:
    """Raise PartitionError for buffers that several ranks would update: a module called in two stages."""
    homes: dict[int, int] = {}
    for i, stage in enumerate(stages):
        if isinstance(stage, TreeStage) and stage.writes:
            for name, buffer in stage.named_buffers():
                if ranks[homes.setdefault(id(buffer), i)] != ranks[i]:
                    raise PartitionError(
                        f"stages {homes[id(buffer)]} and {i}, on different ranks, both hold {name} and may"
                        " change it: choose other cuts with cuts=..."
                    )


def refuse_compiled(stages: StageSequence, trains: bool) -> None:
    """Raise PartitionError for compiled stages in training."""
    for i, stage in enumerate(stages):
        if isinstance(stage, CompiledStage) and trains:
            raise PartitionError(f"stage {i} is compiled for inference: omit loss_fn and call infer")


def refuse_mean_inside(stages: StageSequence) -> None:
    """Raise PartitionError if the model itself computes a mean over tokens."""
    node = next((stage.mean_node for stage in stages if stage.mean_node is not None), None)
    if node is not None:
        raise PartitionError(
            f"the model computes a mean over tokens itself ({node}), and micro-batches may have different"
            " numbers of tokens: give loss_weight=, a function of a micro-batch's target (with"
            " target=labels, for example lambda labels: (labels != -100).sum()), or loss_weight='equal'"
        )


Plan = Mapping[str, ParallelStyle]


def shard_stages(parts: Mapping[int, nn.Module], stages: StageSequence, mesh: DeviceMesh) -> None:
    """Shard this rank's stages over a mesh of (shard) or (data, shard)."""
    if stages.tied:
        raise PartitionError(
            f"{stages.tied[0]}; fully_shard cannot shard one parameter in two modules: choose other cuts with"
            " cuts=..., or omit the mesh's shard dimension"
        )
    for part in parts.values():
        fully_shard(part, mesh=mesh)


def check_plan(stages: StageSequence, mesh: DeviceMesh | None, plan: Plan | None) -> None:
    """Raise PartitionError, on every rank, for a tensor parallel plan that does not fit these stages."""
    if plan is not None and mesh is None:
        raise PartitionError("tensor_plan= needs mesh= with a dimension 'tensor'")
    if plan is None and mesh is not None:
        raise PartitionError("mesh= has a dimension 'tensor', which needs tensor_plan=")
    if plan is None:
        return
    if not all(isinstance(stage, TreeStage) for stage in stages):
        raise PartitionError(
            "tensor_plan= divides modules, and stages cut by the graph call no modules: use"
            " split(..., way='modules')"
        )
    if stages.tied:
        raise PartitionError(
            f"{stages.tied[0]}; a plan would divide it in each stage separately: choose other cuts with"
            " cuts=..."
        )
    names = {name for stage in stages for name, _ in stage.named_modules() if name}
    for pattern in plan:
        if not any(_matches(name, pattern) for name in names):
            hint = near_names(pattern, names)
            raise PartitionError(f"tensor_plan names {pattern!r}, which no stage calls{hint}")


def parallelize_stages(parts: Mapping[int, nn.Module], mesh: DeviceMesh, plan: Plan) -> None:
    """Divide the modules of this rank's stages by the plan, whose names are those of the model."""
    for part in parts.values():
        names = [name for name, _ in part.named_modules() if name]
        own = {pattern: plan[pattern] for pattern in plan if any(_matches(n, pattern) for n in names)}
        if own:
            parallelize_module(part, mesh, own)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name as in `parallelize_module`: each part between dots separately."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def is_sharded(stage: nn.Module) -> bool:
    """Whether a stage has sharded modules."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, also if each rank holds a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like_parameter(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a slot of an optimizer, sharded like its parameter if they have the same size."""
    if isinstance(parameter, DTensor) and parameter.shape == size:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(size, dtype=dtype)

"""Stages that several ranks hold together, by torch's FSDP2 (`fully_shard`) or its tensor parallel plans."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from intarsia.errors import PartitionError, near_names
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.tree_stage import TreeStage

Plan = Mapping[str, ParallelStyle]


def shard_stages(parts: Mapping[int, nn.Module], stages: StageSequence, mesh: DeviceMesh) -> None:
    """Shard this rank's stages over a mesh of (shard) or (data, shard)."""
    if stages.tied:
        raise PartitionError(
            f"{stages.tied[0]}; fully_shard cannot shard one parameter in two modules: cut elsewhere with"
            " cuts=..., or leave the mesh's shard dimension out"
        )
    for part in parts.values():
        fully_shard(part, mesh=mesh)


def check_plan(stages: StageSequence, mesh: DeviceMesh | None, plan: Plan | None) -> None:
    """Refuse a tensor parallel plan that these stages cannot follow, on every rank alike."""
    if (mesh is None) != (plan is None):
        has, lacks = ("tensor_plan=", "mesh= with a dimension") if mesh is None else ("mesh", "tensor_plan=")
        raise PartitionError(f"{has} divides modules over a dimension 'tensor', and needs {lacks} beside it")
    if plan is None:
        return
    if not all(isinstance(stage, TreeStage) for stage in stages):
        raise PartitionError(
            "tensor_plan= replaces what modules compute, and stages cut by the graph call no modules: split"
            " with way='modules'"
        )
    if stages.tied:
        raise PartitionError(
            f"{stages.tied[0]}; a plan would divide it in each by itself: choose other cuts with cuts=..."
        )
    known = {name for stage in stages for name, _ in stage.named_modules() if name}
    for pattern in plan:
        if not any(_matches(name, pattern) for name in known):
            hint = near_names(pattern, known)
            raise PartitionError(f"tensor_plan names {pattern!r}, which no stage calls{hint}")


def parallelize_stages(parts: Mapping[int, nn.Module], mesh: DeviceMesh, plan: Plan) -> None:
    """Divide the modules of this rank's stages as the plan says, each by its name in the model."""
    for part in parts.values():
        names = [name for name, _ in part.named_modules() if name]
        own = {pattern: plan[pattern] for pattern in plan if any(_matches(n, pattern) for n in names)}
        if own:
            parallelize_module(part, mesh, own)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a module, as `parallelize_module` reads it: one part of the name at a time."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def is_sharded(stage: nn.Module) -> bool:
    """Whether a stage is sharded inside."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each rank may hold a shard, whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like_parameter(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a slot of an optimizer, sharded as its parameter where it has its size."""
    if isinstance(parameter, DTensor) and parameter.shape == size:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(size, dtype=dtype)

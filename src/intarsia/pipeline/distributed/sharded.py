"""Stages that are divided among ranks, by torch's FSDP2 (`fully_shard`) or its tensor parallel plans."""

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

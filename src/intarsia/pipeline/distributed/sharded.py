"""Stages that are sharded inside, by torch's FSDP2 (`fully_shard`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.sequence import StageSequence


def shard_stages(parts: Mapping[int, nn.Module], stages: StageSequence, mesh: DeviceMesh) -> None:
    """Shard this rank's stages over a mesh of (shard) or (data, shard)."""
    if stages.tied:
        raise PartitionError(
            f"{stages.tied[0]}; fully_shard cannot shard one parameter in two modules: cut elsewhere with"
            " cuts=..., or leave the mesh's shard dimension out"
        )
    for part in parts.values():
        fully_shard(part, mesh=mesh)


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

"""The ranks that train each weight. Other ranks of the same process group have old copies of it.

A rank's optimizer changes the weights of its own stages. If the model is split again with other cuts, for
example to evaluate it, a rank would compute with the first values of weights that another rank has trained.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from intarsia.errors import PartitionError
from intarsia.pipeline.distributed.world import World, together
from intarsia.runtime.weights import tensor_digest

_TRAINER: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()


def note_trainers(stages: Sequence[nn.Module], stage_ranks: Sequence[int], world: World) -> None:
    """Remember the rank of each weight; of a tied weight, one of its ranks."""
    for stage, rank in zip(stages, stage_ranks, strict=True):
        for parameter in stage.parameters():
            _TRAINER[parameter] = world.mine[rank]
    if len(set(stage_ranks)) > 1:
        _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_lbfgs)


def _refuse_lbfgs(optimizer: Optimizer, *_: Any) -> None:
    """Ranks would search along directions of their own, and some would end before the others."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.LBFGS) else []
    if any(parameter in _TRAINER for group in groups for parameter in group["params"]):
        raise PartitionError(
            "torch.optim.LBFGS computes with the gradients of all weights together, and a rank has those of"
            " its own stages: use an optimizer that updates each weight by itself, such as AdamW"
        )


def note_loaded(parts: Collection[nn.Module], world: World) -> None:
    """This rank has read the weights of these parts, so its copies are present."""
    for part in parts:
        for parameter in part.parameters():
            if parameter in _TRAINER:
                _TRAINER[parameter] = world.me


def refuse_old_copies(stages: Sequence[nn.Module], parts: Collection[nn.Module], world: World) -> None:
    """Raise, on every rank, if the parts of a rank have a weight that another rank has trained meanwhile."""
    if not any(parameter in _TRAINER for stage in stages for parameter in stage.parameters()):
        return  # on every rank: none of these weights is trained, so a pipeline that only infers asks nothing
    held = {id(parameter) for part in parts for parameter in part.parameters()}
    trained = {
        name: tensor_digest(parameter)
        for stage in stages
        for name, parameter in stage.named_parameters()
        if _TRAINER.get(parameter) == world.me and id(parameter) not in held
    }
    present = world.gather_objects(trained)
    with together(world.everyone, "cannot run"):
        for name, parameter in (pair for part in parts for pair in part.named_parameters()):
            trainer = _TRAINER.get(parameter, world.me)
            digest = present.get(trainer, {}).get(name)
            if trainer != world.me and digest not in (None, tensor_digest(parameter)):
                raise PartitionError(
                    f"rank {world.me} has an old copy of {name}, which rank {trainer} trains in another"
                    " pipeline: use the same cuts for both, such as cuts=[cut.node for cut in"
                    " stages.report.cuts], or load a checkpoint"
                )

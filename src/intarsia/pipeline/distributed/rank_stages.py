"""The stages of one rank, with the methods of an `nn.Module` that training loops use."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.distributed.placement import own_part, whole
from intarsia.pipeline.distributed.saved import load_checkpoint, save_checkpoint
from intarsia.pipeline.distributed.world import World, together
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.tied import Tied, gradient_elements
from intarsia.runtime.weights import tensor_digest

# The ranks that train each weight. Other ranks of the same process group have old copies of it.
#
# A rank's optimizer changes the weights of its own stages. If the model is split again with other cuts, for
# example to evaluate it, a rank would compute with the first values of weights that another rank has trained.


_TRAINER: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
# Weights of pipelines in which other ranks train other weights.
_DIVIDED: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()


def note_trainers(stages: Sequence[nn.Module], stage_ranks: Sequence[int], world: World) -> None:
    """Remember the rank of each weight; of a tied weight, one of its ranks."""
    for stage, rank in zip(stages, stage_ranks, strict=True):
        for parameter in stage.parameters():
            _TRAINER[parameter] = world.mine[rank]


def watch_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer that needs the gradients of all ranks before it calls its closure.

    The closure steps the pipeline, and ranks that search by themselves call it unequally often: they hang.
    """
    _DIVIDED.update((parameter, True) for parameter in parameters)
    _register_refusal()


@functools.cache
def _register_refusal() -> None:
    register_optimizer_step_pre_hook(_refuse_lbfgs)


def _refuse_lbfgs(optimizer: Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.LBFGS) else []
    if any(parameter in _DIVIDED for group in groups for parameter in group["params"]):
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


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def clip_by_global_norm(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale the gradients of `parameters` so that the norm over every rank's `counted` is at most `max_norm`.

    A parameter on several ranks is in `counted` on one of them. Returns the norm before clipping.
    """
    if not norm_type > 0:
        raise InputError(f"norm_type is {norm_type}; over ranks, it is a positive number or infinity")
    gradients = [gradient_elements(p) for p in counted if p.grad is not None]
    # Ranks may have gradients of different dtypes, or none, so all ranks send float64. torch does not take
    # sharded and plain gradients together.
    kinds = [[g for g in gradients if isinstance(g, DTensor) is one] for one in (True, False)]
    norms = [whole(get_total_norm(kind, norm_type)).to(device) for kind in kinds if kind]
    own_norm = get_total_norm(norms, norm_type).to(device).double()
    of_ranks = [torch.empty_like(own_norm) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, own_norm, group=group)  # gloo's maximum loses NaN
    dtype = _common_dtype(gradients, group, device)
    total = get_total_norm(of_ranks, norm_type, error_if_nonfinite).to(dtype)
    own = []  # this rank's parts of the gradients, in the same memory
    for parameter in parameters:
        if parameter.grad is not None:
            part = own_part(gradient_elements(parameter))
            own.append(nn.Parameter(part.detach()))
            own[-1].grad = part
    clip_grads_with_norm_(own, max_norm, total)
    return total


def _common_dtype(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> torch.dtype:
    """The dtype of the norm of all ranks' gradients."""
    own = {gradient.real.dtype if gradient.is_complex() else gradient.dtype for gradient in gradients}
    counts = torch.tensor([float(dtype in own) for dtype in _DTYPES], device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
    present = [dtype for dtype, count in zip(_DTYPES, counts.tolist(), strict=True) if count]
    return functools.reduce(torch.promote_types, present or [torch.float32])


class RankStages(StageSequence):
    """This rank's stages as a module. Parameters and buffers have the names of the plain model."""

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        stages: StageSequence,
        stage_ranks: Sequence[int],
        world: World,
        device: torch.device,
    ) -> None:
        super().__init__(list(parts.values()), stages.signature, stages.report, stages.keys)
        self.parts: dict[int, Any] = dict(parts)
        self.layer_names = stages.layer_names
        self.ties: tuple[Tied, ...] = stages.tied  # of all ranks
        self.stage_ranks: list[int] = list(stage_ranks)
        self.world: World = world
        self.device: torch.device = device
        self.rank: int = world.rank
        # Random numbers depend on both, and on the number of the micro-batch. `steps` counts training steps.
        self.seed: int = 0
        self.steps: int = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PartitionError: use `step` or `infer`."""
        raise PartitionError("a pipeline over processes is not called: use step(...), or infer(...)")

    def __deepcopy__(self, memo: dict[int, Any]) -> RankStages:
        raise PartitionError(
            "a pipeline over processes cannot be copied; to keep a copy or an average of its weights, copy"
            " nn.ParameterList(pipe.parameters())"
        )

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load this rank's share from the `state_dict` of the plain model, or of any cut of it."""
        own, keys = self.state_dict(), set(self.keys)
        unknown = [key for key in state_dict if key not in keys]
        missing = [key for key in own if key not in state_dict]
        if strict and (unknown or missing):
            raise InputError(f"state_dict does not fit: missing {missing}, unexpected {unknown}")
        super().load_state_dict({key: state_dict[key] for key in own if key in state_dict}, strict=False)
        note_loaded(self.parts.values(), self.world)

    def save(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint of model and optimizer that any other cut can load. All ranks call it.

        It contains `seed` and `steps`, so that dropout continues with the same random numbers.
        """
        counters = {"seed": self.seed, "steps": self.steps}
        names = dict(self.named_parameters())
        save_checkpoint(path, self.state_dict(), names, optimizer, counters, self.world.everyone)

    def load(
        self, path: str | Path, optimizer: torch.optim.Optimizer | None = None, strict: bool = True
    ) -> None:
        """Read this rank's share of a checkpoint, which any cut may have written. All ranks call it.

        A checkpoint with tensors that the model does not have is refused, unless `strict` is False.
        """
        names, keys = dict(self.named_parameters()), self.keys if strict else None
        counters = load_checkpoint(path, self.state_dict(), names, optimizer, keys, self.world.everyone)
        note_loaded(self.parts.values(), self.world)
        self.seed = counters.get("seed", self.seed)
        self.steps = counters.get("steps", self.steps)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients by their norm over all ranks, as in the plain model, and return the norm."""
        parameters, named = list(self.parameters()), dict(self.named_parameters(remove_duplicate=False))
        homes = {t.name: min(self.stage_ranks[s] for s in t.stages) for t in self.ties}
        elsewhere = {id(named[name]) for name, rank in homes.items() if name in named and rank != self.rank}
        counted = [p for p in parameters if id(p) not in elsewhere]  # each by the first rank that holds it
        group = self.world.pipeline  # all replicas have the same gradients
        return clip_by_global_norm(
            parameters, counted, max_norm, float(norm_type), error_if_nonfinite, group, self.device
        )

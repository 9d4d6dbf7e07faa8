"""The stages one rank holds, with the parts of an `nn.Module` that training loops use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.errors import InputError
from intarsia.pipeline.distributed.clip import clip_by_global_norm
from intarsia.pipeline.distributed.saved import load_checkpoint, save_checkpoint
from intarsia.pipeline.distributed.world import World
from intarsia.pipeline.stages.tied import Tied


class RankStages:
    """This rank's stages; parameters and states go by the plain model's names."""

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        keys: Iterable[str],
        ties: Sequence[Tied],
        stage_ranks: Sequence[int],
        world: World,
        device: torch.device,
    ) -> None:
        # The keys of the plain model's `state_dict`, in its order.
        self.parts: dict[int, Any] = dict(parts)
        self.keys: dict[str, Any | None] = dict.fromkeys(keys)
        self.ties: tuple[Tied, ...] = tuple(ties)
        self.stage_ranks: list[int] = list(stage_ranks)
        self.world: World = world
        self.device: torch.device = device
        self.rank: int = world.rank
        # What random numbers depend on, with the number of the micro-batch; `steps` counts those of training.
        self.seed: int = 0
        self.steps: int = 0

    @property
    def modules(self) -> nn.ModuleList:
        """This rank's stages; their `state_dict`s have the plain model's keys."""
        return nn.ModuleList(self.parts.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once: what its optimizer takes."""
        return iter(self.own_parameters)

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """The same as a list."""
        return list(dict.fromkeys(p for part in self.parts.values() for p in part.parameters()))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each once, with the plain model's names.

        A tied one goes by the first of its names in the plain model, whatever the cut.
        """
        named = self._all_names()
        place = {key: i for i, key in enumerate(self.keys)}
        first: dict[int, str] = {}
        for name in sorted(named, key=lambda n: place.get(n, len(place))):
            first.setdefault(id(named[name]), name)
        return ((first[id(p)], p) for p in self.own_parameters)

    def _all_names(self) -> dict[str, nn.Parameter]:
        """Every name of every parameter of this rank."""
        parts = self.parts.values()
        return {n: p for part in parts for n, p in part.named_parameters(remove_duplicate=False)}

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the plain model's `state_dict`."""
        found: dict[str, Any] = {}
        for part in self.parts.values():
            found.update(part.state_dict())
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's share from the plain model's `state_dict`, or from that of any cut of it."""
        unknown = [key for key in state_dict if key not in self.keys]
        missing = [key for key in self.state_dict() if key not in state_dict]
        if strict and (unknown or missing):
            raise InputError(f"state_dict does not fit: missing {missing}, unexpected {unknown}")
        for part in self.parts.values():
            keys = set(part.state_dict())
            part.load_state_dict({k: v for k, v in state_dict.items() if k in keys}, strict=False)

    def save(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint of model and optimizer that any other cut can load. All ranks call it.

        It holds `seed` and `steps` too, so that a model with dropout goes on as if it had not been stopped.
        """
        counters = {"seed": self.seed, "steps": self.steps}
        names = dict(self.named_parameters())
        save_checkpoint(path, self.state_dict(), names, optimizer, counters, self.world.everyone)

    def load(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read this rank's share of a checkpoint, whatever cut wrote it. All ranks call it."""
        names = dict(self.named_parameters())
        counters = load_checkpoint(path, self.state_dict(), names, optimizer, self.world.everyone)
        self.seed = counters.get("seed", self.seed)
        self.steps = counters.get("steps", self.steps)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this rank's parameters."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> RankStages:
        """Set the mode of this rank's stages; they run only in the mode they were cut in."""
        for part in self.parts.values():
            part.train(mode)
        return self

    def eval(self) -> RankStages:
        """Set evaluation mode."""
        return self.train(False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over all ranks, which is the plain model's; returns it."""
        counted = [p for p in self.own_parameters if self._counts(p)]
        group = self.world.pipeline  # the replicas' gradients are the same
        return clip_by_global_norm(self.own_parameters, counted, max_norm, norm_type, group, self.device)

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the first that holds a parameter."""
        named = self._all_names()
        ties = (tie for tie in self.ties if named.get(tie.name) is parameter)
        holders = (min(self.stage_ranks[s] for s in tie.stages) for tie in ties)
        return next(holders, self.rank) == self.rank

    @property
    def held(self) -> list[int]:
        """The numbers of this rank's stages."""
        return list(self.parts)

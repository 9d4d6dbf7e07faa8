"""Parameters that several stages hold: found, named, and their gradients summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Tied:
    """One parameter, by its name, and the stages that hold it."""

    name: str
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} is held by stages {', '.join(map(str, self.stages))}"


def find_tied(stages: Sequence[nn.Module]) -> tuple[Tied, ...]:
    """The parameters that are one object in more than one stage.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> print(*find_tied([nn.Sequential(layer), nn.Sequential(layer)]))
    0.weight is held by stages 0, 1
    """
    names: dict[int, str] = {}
    homes: dict[int, list[int]] = {}
    for i, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            names.setdefault(id(parameter), name)
            homes.setdefault(id(parameter), []).append(i)
    return tuple(Tied(names[key], tuple(home)) for key, home in homes.items() if len(home) > 1)


class TiedGradients:
    """Keeps parameters that live on several ranks equal: the same start, and the sum of all gradients."""

    def __init__(
        self,
        tied: Sequence[Tied],
        homes: Sequence[int],
        parts: Mapping[int, nn.Module],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for tie in tied:
            ranks = tuple(sorted({homes[s] for s in tie.stages}))
            if len(ranks) == 1:
                continue  # one object on one rank: autograd sums by itself
            members = tuple(_global(r, group) for r in ranks)
            # Every rank of the world makes every group, in the same order, whether it is a member or not.
            if members not in groups:
                if group is None:
                    groups[members] = dist.new_group(list(members))
                elif dist.get_rank() in members:  # beside other pipelines, which know nothing of this one
                    groups[members] = dist.new_group(list(members), use_local_synchronization=True)
            stage = next((s for s in tie.stages if s in parts), None)
            if stage is None:
                continue
            parameter = dict(parts[stage].named_parameters(remove_duplicate=False))[tie.name]
            dist.broadcast(parameter.data, members[0], group=groups[members])
            self._shared.append((parameter, groups[members]))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A step: on its way out, the gradients it made are summed over the ranks.

        What was accumulated before the step is already a sum, so it is set aside meanwhile.
        """
        before = [p.grad for p, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None
        yield
        for (parameter, group), earlier in zip(self._shared, before, strict=True):
            if not parameter.requires_grad:
                continue
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(grad, group=group)
            parameter.grad = grad if earlier is None else earlier.add_(grad)


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)

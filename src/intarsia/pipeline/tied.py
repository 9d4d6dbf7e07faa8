"""Parameters that several stages hold: found, named, and their gradients summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

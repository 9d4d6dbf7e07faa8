"""What a line of a random model may read: the tensors so far, new weights, and the dice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)


class NoOperand(Exception):
    """Nothing that was computed so far fits the template."""


@dataclass
class Scope:
    """Names and values at one place of a model that is being drawn."""

    dice: random.Random
    tensors: dict[str, torch.Tensor]
    weights: list[tuple[str, str]] = field(default_factory=list)  # new parameters: name, expression

    def pick(self, accept: Callable[[torch.Tensor], bool]) -> str:
        """The name of a tensor that is accepted, later ones more often."""
        names = [name for name, value in self.tensors.items() if accept(value)]
        if not names:
            raise NoOperand
        return names[max(self.dice.randrange(len(names)) for _ in range(2))]

    def like(self, name: str) -> str:
        """A tensor of the same dtype whose shape broadcasts with the named one's."""
        one = self.tensors[name]

        def fits(x: torch.Tensor) -> bool:
            pairs = zip(reversed(x.shape), reversed(one.shape), strict=False)
            return x.dtype == one.dtype and all(a == b or 1 in (a, b) for a, b in pairs)

        return self.pick(fits)

    def axis(self, name: str) -> int:
        """A dimension of the named tensor, counted from either end."""
        rank = self.tensors[name].ndim
        return self.dice.randrange(-rank, rank) if rank else 0

    def size(self, name: str, axis: int) -> int:
        """A size of the named tensor."""
        return int(self.tensors[name].shape[axis])

    def weight(self, *shape: int) -> str:
        """The name of a new parameter of this shape."""
        name = f"w{len(self.weights)}"
        sizes = "".join(f"{size}, " for size in shape)
        self.weights.append((name, f"torch.randn({sizes}generator=g) * 0.5"))
        return name

    def choose(self, *items: Any) -> Any:
        """One of these."""
        return self.dice.choice(items)

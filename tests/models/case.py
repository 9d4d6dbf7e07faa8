"""A model outside the zoo: where it comes from, how it is made, and a call to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Call:
    """A model in evaluation mode and a call to it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A name, the library it comes from, and how to make it."""

    name: str
    source: str
    make: Callable[[], Call]

    def call(self) -> Call:
        """The model and its example, the same every time."""
        torch.manual_seed(0)
        made = self.make()
        enliven(made.model)
        made.model.eval()
        return made


def enliven(model: nn.Module) -> None:
    """Weights and statistics as training leaves them: constant ones would hide a wrong operator."""
    with torch.no_grad():
        plain = [one for one in model.parameters() if type(one.data) is torch.Tensor]  # not quantized
        for parameter in plain:
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in model.modules():
            if isinstance(getattr(module, "running_mean", None), torch.Tensor):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)


def program_list(cases: list[Case]) -> Callable[[str], Callable[[Callable[[], Call]], Callable[[], Call]]]:
    """A decorator `@program(name)` that adds what a function makes to the list."""

    def program(name: str) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
        def add(make: Callable[[], Call]) -> Callable[[], Call]:
            cases.append(Case(name, "written by hand", make))
            return make

        return add

    return program

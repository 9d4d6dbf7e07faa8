"""Calls with nothing in them: some kernels refuse tensors without elements, and PyTorch answers at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from intarsia.engines import Program


def has_empty(inputs: Iterable[Any]) -> bool:
    """Whether a tensor among these has no elements."""
    return any(isinstance(value, torch.Tensor) and not value.numel() for value in inputs)


class UnlessEmpty:
    """A program for calls whose tensors all have elements, and PyTorch for the others."""

    def __init__(self, program: Program, otherwise: Program) -> None:
        self.program: Program = program
        self.otherwise: Program = otherwise

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.otherwise(*inputs) if has_empty(inputs) else self.program(*inputs)

"""Modules whose weights stay as they were compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import nn

from intarsia.errors import InputError


class FrozenModule(nn.Module):
    """The methods of `nn.Module` that would change weights are errors."""

    def _weights(self) -> Iterable[torch.Tensor]:
        """The weights that the module computes with."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        """A compiled module computes what the model does in evaluation; `train()` is an error."""
        if mode:
            raise InputError(
                "a compiled module has no gradients and cannot be"
                " trained; train the model, and compile it again"
            )
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # `half()`, `to()`, `cuda()` and similar methods call this, also those of a containing module.
        for dtype, device in {(tensor.dtype, tensor.device) for tensor in self._weights()}:
            converted = fn(torch.empty((0,), dtype=dtype, device=device))
            if (converted.dtype, converted.device) != (dtype, device):
                raise InputError(
                    f"a compiled module stays as it was compiled, {dtype} on {device}; convert the model to"
                    f" {converted.dtype} on {converted.device} and compile it"
                )
        return self

    def share_memory(self) -> Self:
        """Raise InputError, since engines have memory of their own."""
        raise InputError("engines have their own memory; save the module, and load the file in every process")

"""What torch asks of any module, answered by one whose weights are frozen: what cannot be is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from intarsia.errors import InputError


class FrozenModule(nn.Module):
    """A module that stays as it was compiled; its state has the names that the model's has."""

    _state: dict[str, torch.Tensor]

    def train(self, mode: bool = True) -> Self:
        """A compiled module computes what the model does in evaluation; `train()` is an error."""
        if mode:
            raise InputError(
                "a compiled module gives no gradients and cannot be trained; train the model it was made"
                " from, then compile that again"
            )
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # `half()`, `to()`, `cuda()` and their like, also of a module around this one, end here.
        kinds = {(tensor.dtype, tensor.device): tensor for tensor in self._state.values()}
        for (dtype, device), tensor in kinds.items():
            made = fn(tensor.new_empty((0,)))
            if (made.dtype, made.device) != (dtype, device):
                raise InputError(
                    f"a compiled module stays as it was compiled, {dtype} on {device}; convert the model to"
                    f" {made.dtype} on {made.device} and compile that"
                )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._state.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        error_messages = rest[-1]
        for name, tensor in self._state.items():
            given = state_dict.get(prefix + name)
            if given is not None and not torch.equal(given.to(tensor), tensor):
                error_messages.append(
                    f"{prefix}{name} belongs to a compiled module, whose weights are frozen; load it into the"
                    " model and compile that again"
                )

    def share_memory(self) -> Self:
        """Engines hold memory of their own; an error that says what to do."""
        raise InputError("engines hold memory of their own: save it, and load the file in every process")

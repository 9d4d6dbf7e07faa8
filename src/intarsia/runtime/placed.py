"""A module's `forward` with compiled programs in its place, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, StaleWeightsError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled


class PlacedForward:
    """The `forward` of a module: a compiled program where one fits the call, else the module's own.

    Only `forward` is replaced, so the module keeps its class, attributes, children and hooks. Its own forward
    runs in training, under autocast, where an input carries gradients, for calls of other kinds, and from the
    moment on when a weight is written to or replaced.
    """

    def __init__(
        self, path: str, module: nn.Module, programs: Sequence[Compiled], *, loaded: bool = False
    ) -> None:
        self.path, self.module, self.own = path, module, module.forward
        self.programs: list[Compiled | PartlyCompiled] = list(programs)
        self.enabled = True
        self.refused: str | None = None  # why a call first went to the module's own forward
        self._weights = [
            (table, key, tensor, tensor.data_ptr())
            for part in module.modules()
            for table in (part._parameters, part._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]
        # A program that was loaded has weights of its own, so it cannot see that the module's are written to.
        counted = [tensor for _, _, tensor, _ in self._weights if loaded and not tensor.is_inference()]
        self._counted = [tensor.detach() for tensor in counted]
        self._written = sum(tensor._version for tensor in self._counted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled or self.module.training or _autocast() or _carries_gradients(args, kwargs):
            return self.own(*args, **kwargs)
        told, programs = "", self.programs
        for program in programs:
            try:
                if self._replaced():
                    raise StaleWeightsError(f"a weight of {self.path} was replaced or written to")
                made = program(*args, **kwargs)
            except InputError as error:
                told = str(error)
                continue
            except StaleWeightsError as error:
                self.enabled, told = False, str(error)
                break
            if program is not programs[0]:  # the next call is likely to be of the same kind
                self.programs = [program, *(other for other in programs if other is not program)]
            return made
        if self.refused is None or not self.enabled:
            self.refused = told
            warnings.warn(f"{self.path} runs in PyTorch for this call: {told}", stacklevel=2)
        return self.own(*args, **kwargs)

    def enable(self, on: bool = True) -> None:
        """Let the programs answer, or the module's own forward, for now."""
        self.enabled = on

    def put(self) -> None:
        """Put it in the module's place."""
        self.module.__dict__["forward"] = self

    def take_out(self) -> None:
        """Give the module its own forward back."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def _replaced(self) -> bool:
        if self._counted and sum(tensor._version for tensor in self._counted) != self._written:
            return True
        for table, key, tensor, address in self._weights:  # at every call: `any` takes half as long again
            if table.get(key) is not tensor or tensor.data_ptr() != address:
                return True
        return False


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _carries_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))

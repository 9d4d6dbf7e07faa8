"""A module's `forward` with compiled programs in its place, and the way back."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.call import Call
from intarsia.errors import InputError, StaleWeightsError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled
from intarsia.runtime.settings import Settings

# transformers hooks a model's layers when it first runs; they do something where hidden states are asked for.
_IDLE_HOOKS = "transformers.utils.output_capturing"


class PlacedForward:
    """The `forward` of a module: a compiled program where one fits the call, else the module's own.

    Only `forward` is replaced, so the module keeps its class, attributes, children and hooks. Its own forward
    runs in training, under autocast, where an input carries gradients, for calls of other kinds, while a
    module inside is hooked, in another mode or set otherwise (`Settings`), and from when on one is replaced
    or a weight written to.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        programs: Sequence[Compiled],
        examples: Sequence[Call | None] = (),
        *,
        loaded: bool = False,
    ) -> None:
        self.path, self.module, self.own = path, module, module.forward
        self._before = vars(module).get("forward")  # one that was put there, by us or by others
        functools.update_wrapper(self, self.own, updated=())  # others ask what forward takes
        self.__signature__ = inspect.signature(self.own)
        self.__code__ = getattr(self.own, "__code__", None)
        self.programs: list[Compiled | PartlyCompiled] = list(programs)
        # Of each program, a call that it was tried on.
        self.examples = dict(zip(map(id, programs), examples, strict=False))
        self.enabled = True
        self.refused: str | None = None  # why a call first went to the module's own forward
        self._weights = [
            (table, key, tensor, tensor.data_ptr())
            for part in module.modules()
            for table in (part._parameters, part._buffers, vars(part))
            for key, tensor in table.items()
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        ]
        parts = list(module.modules())
        self._parts, inner = parts, parts[1:]  # the module's own hooks are run around what is placed in it
        self._training = [part.training for part in parts]
        self._children = [(part._modules, tuple(part._modules.values())) for part in parts if part._modules]
        self._hooks = [table for part in inner for table in (part._forward_hooks, part._forward_pre_hooks)]
        self._settings = Settings(module, PlacedForward)
        self._hooked, self._counted_hooks = self._user_hooks(), sum(map(len, self._hooks))
        # A program that was loaded has weights of its own, so it cannot see that the module's are written to.
        counted = [tensor for _, _, tensor, _ in self._weights if loaded and not tensor.is_inference()]
        self._counted = [tensor.detach() for tensor in counted]
        self._written = sum(tensor._version for tensor in self._counted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled or self.module.training or _autocast() or torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        if _carries_gradients(args, kwargs):
            return self.own(*args, **kwargs)
        told, programs = "", self.programs
        for program in programs:
            try:
                if self._replaced():
                    raise StaleWeightsError(f"a weight of {self.path} was replaced or written to")
                self._check_parts()
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
        if vars(self.module).get("forward") is not self:
            return
        if self._before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or what is read of a file, has its own forward: its weights are others."""
        warnings.warn(f"a copy of {self.path} runs as it is, not compiled", stacklevel=3)
        return own_forward, (self.module, self._before)

    def _replaced(self) -> bool:
        if self._counted and sum(tensor._version for tensor in self._counted) != self._written:
            return True
        for table, key, tensor, address in self._weights:  # at every call: `any` takes half as long again
            if table.get(key) is not tensor or tensor.data_ptr() != address:
                return True
        return False

    def _check_parts(self) -> None:
        """Refuse a call where modules inside are not as they were; for good where they are others."""
        for table, children in self._children:
            if tuple(table.values()) != children:
                raise StaleWeightsError(f"a module inside {self.path} was replaced, added or taken away")
        if [part.training for part in self._parts] != self._training:
            raise InputError(f"a module inside {self.path} is in another mode (training) than when compiled")
        if (count := sum(map(len, self._hooks))) != self._counted_hooks:
            if self._user_hooks() != self._hooked:
                raise InputError(f"a module inside {self.path} has a hook that it had not when compiled")
            self._counted_hooks = count
        if (name := self._settings.changed()) is not None:
            raise InputError(f"{name} of {self.path} is another than when compiled")

    def _user_hooks(self) -> int:
        """How many hooks there are inside, without those that wait for a call which no program answers."""
        made = [hook for table in self._hooks for hook in table.values()]
        return sum(getattr(hook, "__module__", "") != _IDLE_HOOKS for hook in made)


def own_forward(module: nn.Module, before: Any) -> Any:
    """The forward that a module had `before`, its class's where it had none of its own."""
    return MethodType(type(module).forward, module) if before is None else before


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _carries_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))

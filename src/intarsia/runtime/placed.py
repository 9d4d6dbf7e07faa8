"""A module's `forward` with compiled programs in its place, and the way back.

`forward` is replaced and not the module: pipelines ask their modules for `config`, `dtype` and `device`.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call
from intarsia.errors import InputError, StaleWeightsError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.freshness import Freshness, weights_of
from intarsia.runtime.partly import PartlyCompiled
from intarsia.runtime.settings import Replacement


class PlacedForward(Replacement):
    """The `forward` of a module: a compiled program where one fits the call, else the module's own.

    Only `forward` is replaced, so the module keeps its class, attributes, children and hooks. Its own forward
    runs in training, under autocast, where gradients are wanted, for calls of other kinds, while a module
    inside is hooked, in another mode or set otherwise, and from when on one is replaced or a weight written
    to (`Freshness`). A warning says why, once for each reason. Generation has an `answer` of its own.
    """

    asks_weights = False  # whether gradients are wanted wherever they are enabled, or only of inputs

    def __init__(
        self,
        path: str,
        module: nn.Module,
        programs: Sequence[Compiled | PartlyCompiled] = (),
        examples: Sequence[Call | None] = (),
    ) -> None:
        self.path: str = path
        self.module: nn.Module = module
        self.own: Callable[..., Any] = module.forward
        self._before = vars(module).get("forward")  # one that was put there, by us or by others
        functools.update_wrapper(self, self.own, updated=())  # others ask what forward takes
        self.__signature__: inspect.Signature = inspect.signature(self.own)
        self.__code__: Any | None = getattr(self.own, "__code__", None)
        self.programs: list[Compiled | PartlyCompiled] = list(programs)
        # Of each program, a call that it was tried on.
        self.examples: dict[int, Call | None] = dict(zip(map(id, programs), examples, strict=False))
        self.runs: dict[str, int] = {"own": 0}  # calls by who answered them
        self.enabled: bool = True
        self.refused: str | None = None  # why a call went to the module's own forward, the last reason
        self._reasons: set[str] = set()  # all of them, without numbers
        self._freshness = Freshness(weights_of(module), module, in_place=True)
        self._here = threading.local()  # whether a program runs, which may be the module itself

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns, from a program; InputError says why none is for this call."""
        reason, programs = "", self.programs
        for program in programs:
            try:
                answer = program(*args, **kwargs)
            except InputError as error:
                reason = str(error)
                continue
            if program is not programs[0]:  # the next call is likely to be of the same kind
                self.programs = [program, *(other for other in programs if other is not program)]
            return answer
        raise InputError(reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._here, "answers", False) or torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        if self.enabled and not self.module.training and not self._is_left_to_module(args, kwargs):
            try:
                self.check_fresh()
                self._here.answers = True
                return self.answer(args, kwargs)
            except StaleWeightsError as error:
                self.enabled = False
                self._warn(str(error))
            except InputError as error:  # nothing was written yet
                self._warn(str(error))
            finally:
                self._here.answers = False
        self.runs["own"] += 1
        return self.own(*args, **kwargs)

    def _is_left_to_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return True
        if not torch.is_grad_enabled():
            return False
        leaves = pytree.tree_leaves((args, kwargs))
        return self.asks_weights or any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)

    def _warn(self, reason: str) -> None:
        kind = re.sub(r"\d+", "", reason)  # one warning for all sizes, and not one for each token
        if kind not in self._reasons:
            self._reasons.add(kind)
            self.refused = reason
            warnings.warn(f"{self.path} runs in PyTorch for this call: {reason}", stacklevel=3)

    def enable(self, on: bool = True) -> None:
        """Let the programs answer, or the module's own forward, for now."""
        self.enabled = on

    def put(self) -> None:
        """Put it in the module's place."""
        for program in self.programs:
            if isinstance(program, Compiled):
                program.weights.is_watched_elsewhere = True
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
        warnings.warn(f"a copy of {self.path} is not compiled", stacklevel=3)
        return own_forward, (self.module, self._before)

    def check_fresh(self) -> None:
        """Refuse a call where the module is not as it was; for good where weights or modules are others."""
        change = self._freshness.contents_change() or self._freshness.structure_change(thorough=True)
        if change is not None:
            error = StaleWeightsError if change.kind.is_final else InputError
            raise error(str(change))


def own_forward(module: nn.Module, before: Any) -> Any:
    """The forward that a module had `before`, its class's where it had none of its own."""
    return MethodType(type(module).forward, module) if before is None else before

"""A module's `forward` that compiled programs replace, and restoring it.

`forward` is replaced and not the module, since pipelines read `config`, `dtype` and `device` of their
modules.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
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
    """The `forward` of a module: a compiled program if one fits the call; otherwise the module's own.

    Only `forward` is replaced, so the module keeps its class, attributes, children and hooks. The module's
    own forward runs in training, under autocast, if gradients are needed, and for calls without a program. It
    also runs while a module inside has a new hook, mode or setting, and from the moment at which a module is
    replaced or a weight written to (`Freshness`). A warning gives each reason once. Generation overrides
    `answer`.
    """

    asks_weights = False  # whether gradients are needed wherever they are enabled, or only for inputs

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
        self._before = vars(module).get("forward")  # a forward that was set on the module before
        functools.update_wrapper(self, self.own, updated=())  # other code reads the signature of forward
        self.__signature__: inspect.Signature = inspect.signature(self.own)
        self.__code__: Any | None = getattr(self.own, "__code__", None)
        self.programs: list[Compiled | PartlyCompiled] = list(programs)
        # For each program, a call that it was compared on.
        self.examples: dict[int, Call | None] = dict(zip(map(id, programs), examples, strict=False))
        self.runs: dict[str, int] = {"own": 0}  # the number of calls by what answered them
        self.enabled: bool = True
        self.refused: str | None = None  # the last reason for a call of the module's own forward
        self._reasons: set[str] = set()  # all reasons, without numbers
        self._freshness = Freshness(weights_of(module), module, in_place=True)
        self._here = threading.local()  # whether a program runs, which may call the module

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's result, by a program; InputError says why no program fits this call."""
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
        if self.uses_programs(args, kwargs):
            self._here.answers = True
            try:
                return self.answer(args, kwargs)
            except (InputError, StaleWeightsError) as error:  # nothing has been written
                self._refuse(error)
            finally:
                self._here.answers = False
        self.runs["own"] += 1
        return self.own(*args, **kwargs)

    def uses_programs(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
        """Whether programs may answer now: the mode allows it, and the module has not changed."""
        if not self.enabled or self.module.training or self._is_left_to_module(args, kwargs or {}):
            return False
        try:
            self.check_fresh()
        except (InputError, StaleWeightsError) as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: InputError | StaleWeightsError) -> None:
        """Warn why the module's own forward answers. If its weights changed, it answers all later calls."""
        self.enabled = self.enabled and not isinstance(error, StaleWeightsError)
        self._warn(str(error))

    def _is_left_to_module(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return True
        if not torch.is_grad_enabled():
            return False
        leaves = pytree.tree_leaves((args, kwargs))
        return self.asks_weights or any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)

    def _warn(self, reason: str) -> None:
        kind = re.sub(r"\d+", "", reason)  # one warning for all sizes and tokens
        if kind not in self._reasons:
            self._reasons.add(kind)
            self.refused = reason
            warnings.warn(f"{self.path} runs in PyTorch for this call: {reason}", stacklevel=3)

    def enable(self, on: bool = True) -> None:
        """Use the programs, or with `on=False` the module's own forward."""
        self.enabled = on

    def put(self) -> None:
        """Replace the module's forward."""
        for program in self.programs:
            if isinstance(program, Compiled):
                program.weights.is_watched_elsewhere = True
        self.module.__dict__["forward"] = self

    def take_out(self) -> None:
        """Restore the module's own forward."""
        if vars(self.module).get("forward") is not self:
            return
        if self._before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or one read from a file, has its own forward, as it has other weights."""
        warnings.warn(f"a copy of {self.path} is not compiled", stacklevel=3)
        return own_forward, (self.module, self._before)

    def check_fresh(self) -> None:
        """Raise InputError if the module has changed; StaleWeightsError if that cannot be undone."""
        change = self._freshness.contents_change() or self._freshness.structure_change(thorough=True)
        if change is not None:
            error = StaleWeightsError if change.kind.is_final else InputError
            raise error(str(change))


def own_forward(module: nn.Module, before: Any) -> Any:
    """The forward that a module had before: that of its class if it had none of its own."""
    return MethodType(type(module).forward, module) if before is None else before

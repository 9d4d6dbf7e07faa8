"""Forwards that compiled programs replace: of a module in a user's program, and of parts of a model.

`forward` is replaced and not the module, since pipelines read `config`, `dtype` and `device` of their
modules. A model that could not be captured as a whole is a copy in which some submodules are compiled.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call
from intarsia.capture.protect import evaluating, shared_copy
from intarsia.errors import InputError, RefitError, StaleWeightsError
from intarsia.graph.plan import Plan
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.freshness import Freshness, weights_of
from intarsia.runtime.settings import Replacement
from intarsia.runtime.weights import FrozenModule, warn_of_change, warn_of_gradients


@dataclass(frozen=True)
class PartsPlan:
    """The plan of each compiled submodule by path, and why the model has no plan as a whole."""

    parts: Mapping[str, Plan]
    reason: str

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines in use, including PyTorch."""
        return tuple(dict.fromkeys([*(e for plan in self.parts.values() for e in plan.engines), "pytorch"]))

    def __len__(self) -> int:
        return len(self.parts)

    def __str__(self) -> str:
        plans = [f"{path}: {plan}" for path, plan in self.parts.items()]
        what = f"{len(self.parts)} of its modules are compiled" if self.parts else "no part of it is compiled"
        return "\n".join([f"Not captured as a whole, {what}; the rest runs as it is. {self.reason}", *plans])


class PartForward(Replacement):
    """The `forward` of a compiled submodule. Calls without a program use the module's own forward.

    This is simpler than `PlacedForward`: the module is a copy that nobody trains, and stale weights are an
    error, as for a model that was compiled as a whole. But the copy can be changed, for one call by
    `torch.func.functional_call`; its own forward then answers.
    """

    def __init__(self, path: str, compiled: Compiled, module: nn.Module) -> None:
        self.path: str = path
        self.compiled: Compiled = compiled
        self.otherwise: Callable[..., Any] = module.forward
        self.refused: str | None = None  # why the first call used the module's own forward
        self._freshness = Freshness(weights_of(module), module, in_place=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            change = self._freshness.structure_change(thorough=True)
            if change is not None:
                raise InputError(str(change))
            return self.compiled(*args, **kwargs)
        except InputError as error:
            if self.refused is None:
                self.refused = str(error)
                warnings.warn(f"{self.path} runs in PyTorch for this call: {error}", stacklevel=2)
        return self.otherwise(*args, **kwargs)


class PartlyCompiled(FrozenModule):
    """A model some of whose submodules run on engines. Call it like the model; it computes as in evaluation.

    `parts` are the compiled submodules by path, `plan` has their plans, and `notes` say what is not compiled
    and why. The weights are the model's own; its Python attributes are copies.

    >>> import intarsia
    >>> class Steps(nn.Module):
    ...     def forward(self, x):
    ...         return x + 1 if x.sum().item() > 0 else x
    >>> partly = intarsia.compile(Steps(), (torch.ones(2),))
    >>> type(partly).__name__, partly(torch.ones(2))
    ('PartlyCompiled', tensor([2., 2.]))
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, Compiled],
        notes: Sequence[str],
        reason: str,
        original: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        # Watches the original model: this one is a copy, which shares its weights.
        self._freshness: Freshness | None = None
        if original is not None and not isinstance(original, torch.jit.ScriptModule):
            self._freshness = Freshness(weights_of(original), original)
        self.parts: dict[str, Compiled] = dict(parts)
        self.plan: PartsPlan = PartsPlan({path: part.plan for path, part in parts.items()}, reason)
        self.own_notes: tuple[str, ...] = tuple(notes)  # without those of the parts
        # TorchScript's modules cannot be copied in evaluation mode.
        self._switch_mode = any(module.training for module in model.modules())

    @property
    def notes(self) -> tuple[str, ...]:
        """Further information for the user."""
        return (
            *self.own_notes,
            *(f"{path}: {note}" for path, part in self.parts.items() for note in part.notes),
        )

    @property
    def differences(self) -> tuple[str, ...]:
        """When a part can answer differently from the module that it was compiled from."""
        return tuple(f"{path}: {text}" for path, part in self.parts.items() for text in part.differences)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        warn_of_gradients(args, kwargs)
        if self._freshness is not None:
            self._freshness.advance()
            change = self._freshness.structure_change()
            if change is not None:
                self._freshness = None
                warn_of_change(change, stacklevel=4)
        with torch.no_grad():
            if not self._switch_mode:
                return self.model(*args, **kwargs)
            with evaluating(self.model):
                return self.model(*args, **kwargs)

    def _weights(self) -> Iterable[torch.Tensor]:
        return chain(self.parameters(), self.buffers())

    def refit(self, weights: object) -> None:
        """Raise RefitError: only a model that was compiled as a whole takes new weights."""
        raise RefitError("the model was compiled in parts, which take no new weights; compile it again")

    def uncompiled(self) -> nn.Module:
        """The model without its compiled parts, in evaluation; its weights are shared."""
        copy = shared_copy(self.model)
        for path in self.parts:
            module = copy.get_submodule(path)
            otherwise = module.__dict__.pop("forward").otherwise
            if getattr(otherwise, "__func__", None) is not type(module).forward:
                module.__dict__["forward"] = otherwise
        return copy

    def extra_repr(self) -> str:
        return f"{len(self.parts)} modules compiled: {', '.join(self.parts)}"


CompiledModel = Compiled | PartlyCompiled


def assembled(
    model: nn.Module, parts: Mapping[str, Compiled], notes: Sequence[str], reason: str
) -> PartlyCompiled:
    """A copy of the model that shares its weights, with compiled modules in place of submodules."""
    copy = shared_copy(model)
    for path, part in parts.items():
        module = copy.get_submodule(path)
        # The module keeps its class, attributes and children, which other code may read.
        module.__dict__["forward"] = PartForward(path, part, module)
    return PartlyCompiled(copy, parts, notes, reason, model)


class PlacedForward(Replacement):
    """The `forward` of a module: a compiled program if one fits the call; otherwise the module's own.

    Only `forward` is replaced, so the module keeps its class, attributes, children and hooks. The module's
    own forward runs in training, under autocast, if gradients are needed, and for calls without a program. It
    also runs while a module inside has a new hook, mode or setting, and from the moment at which a module is
    replaced or a weight written to (`Freshness`). A warning gives each reason once. Generation overrides
    `answer`.
    """

    # Whether the module answers every call in grad mode, or only those whose inputs require gradients.
    asks_weights = False

    def __init__(
        self,
        path: str,
        module: nn.Module,
        programs: Sequence[CompiledModel] = (),
        examples: Sequence[Call | None] = (),
    ) -> None:
        self.path: str = path
        self.module: nn.Module = module
        self.own: Callable[..., Any] = module.forward
        self._before = vars(module).get("forward")  # a forward that was set on the module before
        functools.update_wrapper(self, self.own, updated=())  # other code reads the signature of forward
        self.__signature__: inspect.Signature = inspect.signature(self.own)
        self.__code__: Any | None = getattr(self.own, "__code__", None)
        self.programs: list[CompiledModel] = list(programs)
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
            try:
                with self.answering():
                    return self.answer(args, kwargs)
            except (InputError, StaleWeightsError) as error:  # nothing has been written
                self._refuse(error)
        self.runs["own"] += 1
        return self.own(*args, **kwargs)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While this holds, calls of the module are its own forward's: a program may be the module itself."""
        self._here.answers = True
        try:
            yield
        finally:
            self._here.answers = False

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

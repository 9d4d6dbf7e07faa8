"""A model that could not be captured as a whole: some of its submodules are compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from intarsia.capture.protect import evaluating, shared_copy
from intarsia.errors import InputError, RefitError
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

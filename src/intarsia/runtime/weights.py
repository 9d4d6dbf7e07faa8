"""The weights that a module was compiled with: they are the model's tensors, so they are watched.

A write in place is an error: some segments would use the new values, and the old ones are lost. A replaced
parameter is a warning at one of the next eight calls, since looking up every weight in its module takes as
long as reading torch's counters (0.05 to 0.15 us a weight). torch does not count writes through `.data` or
numpy. Samples show most of them; the digest also shows writes of few elements.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intarsia.errors import DifferenceWarning, InputError, StaleWeightsError, warn
from intarsia.memory import release_freed, release_mapped
from intarsia.plain_tensors import plain_tensors
from intarsia.quantized import has_packed_weights
from intarsia.runtime.freshness import Change, Freshness, Kind, Weight, weights_of
from intarsia.runtime.ownership import storages_of


class FrozenWeights:
    """The weights of a compiled module, and whether the model still has them.

    Engines and PyTorch read the weights in the model's memory, and some engines pack them. After a write,
    some segments would use the new values and others not, so the next call is an error that names the weight.
    If torch does not count the write (`p.data`, numpy), it is one of the next eight calls. If a weight, a
    module or an attribute was replaced, or a hook was added, the compiled module continues unchanged, and
    warns once at one of the next eight calls.
    """

    def __init__(
        self,
        model: nn.Module | None,
        used: Iterable[torch.Tensor],
        changing: Mapping[str, torch.Tensor],
        constants: Mapping[str, Any],
        *,
        runs_model: bool = False,
    ) -> None:
        ours, live = {place for tensor in used for place in storages_of(tensor)}, set(changing)
        candidates = [] if model is None else [w for w in weights_of(model) if w.name not in live]
        weights = [w for w in candidates if not ours.isdisjoint(storages_of(w.tensor))]
        if model is not None:
            weights += _unregistered(constants, [w.tensor for w in weights], changing)
        self._tensors = [(weight.name, weight.tensor.detach()) for weight in weights]
        states = [] if model is None or runs_model else [w for w in weights_of(model) if w.name in live]
        self._freshness = Freshness([*weights, *(replace(w, is_state=True) for w in states)], model)
        self._is_replaced = False  # a warning was given
        self.is_watched_elsewhere = False  # by the `PlacedForward` that calls the module

    def check(self, *, thorough: bool = False) -> None:
        """Raise StaleWeightsError if a weight was written to; warn once if something was replaced."""
        if self.is_watched_elsewhere and not thorough:
            return
        change = self._freshness.contents_change(thorough=thorough)
        if change is not None:
            raise StaleWeightsError(
                f"{change.what} of the model changed after compiling; call refit(model) of the compiled"
                " module, or compile the model again"
            )
        if self._is_replaced:
            return
        change = self._freshness.structure_change(thorough=thorough)
        if change is not None:
            self._is_replaced = True
            advice = None
            if change.kind is Kind.REPLACED:
                advice = "the tensors it was compiled with: call its refit(model) to use the new ones"
            warn_of_change(change, advice, stacklevel=4)

    def digest(self) -> str:
        """SHA-256 of the current weights, with their names."""
        whole = hashlib.sha256()
        for name, tensor in self._tensors:
            whole.update(f"{name} {tensor_digest(tensor)}".encode())
        return whole.hexdigest()


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


def asks_gradients(inputs: Iterable[Any]) -> bool:
    """Whether PyTorch would compute gradients of one of these inputs."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def warn_of_gradients(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Warn if a call asks for gradients: a perceptual loss by a compiled network would train nothing."""
    if torch.is_grad_enabled() and asks_gradients(pytree.tree_leaves((args, kwargs))):
        warn(
            "an input requires gradients, and a compiled module computes none: its results are detached. Call"
            " the model itself where a loss depends on the results, or use torch.no_grad() where none does",
            DifferenceWarning,
        )


def warn_of_change(change: Change, advice: str | None = None, *, stacklevel: int) -> None:
    """Warn that the model has changed since it was compiled."""
    if change.kind is Kind.REPLACED:
        sentence = f"{change.what} of the model was replaced after compiling"
    else:
        sentence = f"the model was changed after compiling: {change}"
    advice = advice or "the model as it was: compile the model again"
    warnings.warn(f"{sentence}; the compiled module continues with {advice}", stacklevel=stacklevel)


def _unregistered(
    constants: Mapping[str, Any], named: Iterable[torch.Tensor], changing: Mapping[str, torch.Tensor]
) -> list[Weight]:
    """Tensors of the graph that are no attributes of modules, such as weights in a plain list."""
    registered = {place for tensor in (*named, *changing.values()) for place in storages_of(tensor)}
    tensors = [value for value in constants.values() if isinstance(value, torch.Tensor)]
    return [
        Weight(f"an unregistered tensor of shape {tuple(tensor.shape)}", tensor)
        for tensor in tensors
        if not tensor.is_meta and storages_of(tensor) and registered.isdisjoint(storages_of(tensor))
    ]


_LARGE = 1 << 24  # bytes of weights; for fewer, returning memory took a tenth of a compile


def release_memory(model: nn.Module | None, *, mapped: bool = True) -> None:
    """Give back freed memory and, if `mapped`, that of weights in a file; nothing if the weights are few."""
    tensors = [] if model is None else large_weights(model)
    if model is not None and not tensors:
        return
    release_freed()
    if mapped:
        release_mapped(tensors)


_EVERY_S = 0.25  # ONNX Runtime packs about 25 MiB of weights in 4 bits in this time


@contextmanager
def releasing_memory(module: fx.GraphModule) -> Iterator[None]:
    """A block during which freed memory and that of weights in few bits in a file is given back regularly.

    While an engine builds a program, it reads each weight once and makes its own copy, ONNX Runtime by way of
    another. Otherwise all are in memory at the end. For 0.3 GB of weights, each time takes about 10 ms.
    """
    tensors = large_weights(module) if has_packed_weights(module) else []
    done = threading.Event()

    def release() -> None:
        while not done.wait(_EVERY_S):
            release_freed()
            release_mapped(tensors)

    thread = threading.Thread(target=release, name="intarsia: memory of weights", daemon=True)
    if tensors:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if tensors:
            thread.join()


def large_weights(model: nn.Module) -> list[torch.Tensor]:
    """The plain tensors of a model's weights; none if they are few."""
    tensors = [part for weight in weights_of(model) for part in plain_tensors(weight.tensor)]
    return tensors if sum(tensor.numel() * tensor.element_size() for tensor in tensors) >= _LARGE else []


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and elements; of a subclass, also of its parts."""
    whole = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in plain_tensors(tensor):
        flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
        if part is not tensor:
            whole.update(f"{part.dtype} {tuple(part.shape)}".encode())
        whole.update(flat.view(torch.uint8).numpy().data)
    return whole.hexdigest()

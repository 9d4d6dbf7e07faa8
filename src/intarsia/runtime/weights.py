"""The weights a module was compiled with: frozen as a whole, and watched, since they lie in the model."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from intarsia.errors import StaleWeightsError

# torch's count of in-place changes; it has no public name. A tensor made in inference mode keeps none.
VERSION = attrgetter("_version")
# To see whether they are still its own, a call looks up an eighth of the weights in the model, at least 8.
_LOOKED_AT = 8


class FrozenWeights:
    """What the compiled module computes with, and whether the model still holds it.

    Engines and PyTorch read the weights where the model has them; some pack them into a layout of their own.
    A weight written to in place would so be taken by some segments and not by others: the next call is an
    error that names it. A weight that was replaced (`model.weight = ...`, `p.data = ...`, `model.half()`)
    leaves the compiled module as it was: it goes on with the old ones, and warns once, at one of the next
    eight calls. Writing through `p.data` or numpy is not counted by torch, and is not seen; `digest` sees it.
    """

    def __init__(
        self, model: nn.Module | None, used: Iterable[torch.Tensor], changing: Iterable[str]
    ) -> None:
        ours, live = {_address(tensor) for tensor in used}, set(changing)
        found = [] if model is None else [item for item in _weights(model) if item[0] not in live]
        found = [item for item in found if _address(item[3]) in ours]
        self._places = [(name, table, key, tensor, tensor.data_ptr()) for name, table, key, tensor in found]
        counted = [(name, tensor) for name, _, _, tensor in found if _version(tensor) is not None]
        self._names = [name for name, _ in counted]
        self.tensors = [tensor.detach() for _, tensor in counted]  # a detached one shares the count
        self._versions = [VERSION(tensor) for tensor in self.tensors]
        self.total = sum(self._versions)  # counts only grow, so the sum tells
        self._next, self._told = 0, False

    def check(self) -> None:
        """Raise StaleWeightsError if a weight was written to; warn, once, if one was replaced."""
        if sum(map(VERSION, self.tensors)) != self.total:
            self._raise()
        places = self._places
        if self._told or not places:
            return
        start, end = self._next, self._next + max(_LOOKED_AT, -(-len(places) // _LOOKED_AT))
        self._next = end if end < len(places) else 0
        for name, table, key, tensor, address in places[start:end]:
            if table.get(key) is not tensor or tensor.data_ptr() != address:
                self._told = True
                warnings.warn(
                    f"{name} of the model was replaced after compiling; the compiled module goes on with the"
                    " weights it was compiled with: call its refit(model) to use the new ones",
                    stacklevel=3,
                )
                return

    def digest(self) -> str:
        """SHA-256 of the weights as they are now, with their names."""
        whole = hashlib.sha256()
        for name, _, _, tensor, _ in self._places:
            whole.update(f"{name} {tensor_digest(tensor)}".encode())
        return whole.hexdigest()

    def _raise(self) -> None:
        changed = [
            name
            for name, tensor, before in zip(self._names, self.tensors, self._versions, strict=True)
            if VERSION(tensor) != before
        ]
        some = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise StaleWeightsError(
            f"{some} of the model changed after compiling; the compiled module holds the weights it was"
            " compiled with, and some of its segments would now read others: call its refit(model), or"
            " compile the model again"
        )


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and, where they lie in plain memory, elements."""
    whole = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is torch.strided:
        flat = tensor.detach().cpu().contiguous().flatten()
        whole.update(flat.view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _weights(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Each parameter, buffer and tensor attribute: its name, where it is kept, and itself."""
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for key, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    yield f"{path}.{key}" if path else key, table, key, tensor


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return int(VERSION(tensor))
    except RuntimeError:
        return None


def _address(tensor: torch.Tensor) -> tuple[int, torch.device]:
    strided = tensor.layout is torch.strided
    return (tensor.untyped_storage().data_ptr() if strided else id(tensor)), tensor.device

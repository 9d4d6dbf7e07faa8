"""Measured costs on disk, by a digest of the layer."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.cache.machine import machine_key
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.pipeline.gpipe.microbatch import Batch

# The most costs in the file; the oldest are deleted.
MAX_ENTRIES = 20_000


def cache_path() -> Path:
    """The file of costs: `profiles.json` in the cache directory."""
    return cache_directory() / "profiles.json"


class CostCache:
    """Costs in a JSON file. A disabled cache is empty and stores nothing."""

    def __init__(self, enabled: bool = True) -> None:
        self.store: JsonStore | None = JsonStore(cache_path()) if enabled else None
        self.new_costs: dict[str, float] = {}
        self.costs: dict[str, float] = {} if self.store is None else _costs(self.store.read())

    def get(self, key: str | None) -> float | None:
        """The stored cost, or None."""
        return None if key is None else self.costs.get(key)

    def put(self, key: str | None, cost: float) -> None:
        """Store a cost, if there is a key."""
        if key is not None and self.store is not None:
            self.new_costs[key] = self.costs[key] = cost

    def save(self) -> None:
        """Write the new costs. Costs that another process has written meanwhile stay."""
        if self.store is not None and self.new_costs:
            self.store.update(self.new_costs, keep=MAX_ENTRIES)


def _costs(table: dict[str, Any]) -> dict[str, float]:
    return {key: float(cost) for key, cost in table.items() if type(cost) in (int, float) and cost >= 0}


def layer_key(
    layer: nn.Module, batch: Batch, skips: dict[Any, Any], device: torch.device, kind: str
) -> str | None:
    """A digest of everything that a layer's cost depends on; None if the layer cannot be pickled.

    It covers the layer's attributes, the code of its methods, shapes and dtypes of tensors (not their
    values), and the machine. A layer of a local class, or with a closure, cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _ContentPickler(buffer, protocol=4).dump((layer, batch.value, skips))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    code = [_code_of(type(module)) for module in layer.modules()]
    gradients = [x.requires_grad for x in batch]
    digest = hashlib.blake2b(digest_size=20)
    for part in (kind, _machine(device), code, gradients):
        digest.update(repr(part).encode())
    digest.update(buffer.getvalue())
    return digest.hexdigest()


class _ContentPickler(pickle.Pickler):
    """Writes shapes and dtypes in place of tensors."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ("tensor", tuple(value.shape), str(value.dtype), value.stride(), value.requires_grad)
        return None


def _code_of(cls: type[nn.Module]) -> str:
    """A digest of the code of a module class and its bases; for bases in torch, of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            digest.update(base.__qualname__.encode())
            continue
        for name, member in sorted(vars(base).items()):
            function = getattr(member, "__func__", member)
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                digest.update(name.encode())
                _hash_code(digest, code)
    return digest.hexdigest()


def _hash_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _hash_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def _machine(device: torch.device) -> tuple[Any, ...]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine_key()
    return name, torch.__version__, torch.is_autocast_enabled(device.type), torch.get_default_dtype()

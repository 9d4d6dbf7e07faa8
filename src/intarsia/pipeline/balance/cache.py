"""Measured costs on disk, by the content of what was measured."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import platform
import tempfile
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.cache.directory import cache_directory
from intarsia.pipeline.balance.probe import LayerProbe

# More than this many costs are never kept; the oldest go.
MAX_ENTRIES = 20_000


def cache_path() -> Path:
    """Where the costs are kept: `profiles.json` in the cache directory."""
    return cache_directory() / "profiles.json"


class CostCache:
    """A small JSON file of costs. Switched off, it knows nothing and keeps nothing."""

    def __init__(self, enabled: bool = True) -> None:
        self.path = cache_path() if enabled else None
        self.fresh: dict[str, float] = {}
        self.known = {} if self.path is None else _read(self.path)

    def get(self, key: str | None) -> float | None:
        """The cost of something measured before."""
        return None if key is None else self.known.get(key)

    def put(self, key: str | None, cost: float) -> None:
        """Remember a cost; without a key there is nothing to find it by."""
        if key is not None and self.path is not None:
            self.fresh[key] = self.known[key] = cost

    def save(self) -> None:
        """Write what is new; another process may have written meanwhile, and keeps what it wrote."""
        if self.path is None or not self.fresh:
            return
        costs = _read(self.path) | self.fresh
        kept = dict(list(costs.items())[-MAX_ENTRIES:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".profiles-")
        except OSError:  # a home that cannot be written to costs a measurement, not the balance
            return
        with os.fdopen(handle, "w") as file:
            json.dump(kept, file)
        os.replace(name, self.path)


def _read(path: Path) -> dict[str, float]:
    try:
        costs = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or damaged: measured again and replaced
        return {}
    if not isinstance(costs, dict):
        return {}
    return {key: float(cost) for key, cost in costs.items() if isinstance(cost, int | float) and cost >= 0}


def probe_key(probe: LayerProbe, device: torch.device, kind: str) -> str | None:
    """A digest of everything a layer's cost depends on; None where that cannot be written down.

    It holds the layer's attributes, the code of its methods, shapes and types of tensors (not their
    values), and the machine. A layer of a local class, or one that holds a closure, has no such digest.
    """
    buffer = io.BytesIO()
    try:
        _ContentPickler(buffer, protocol=4).dump((probe.layer, probe.batch.value, probe.skips))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    code = [_code_of(type(module)) for module in probe.layer.modules()]
    gradients = [x.requires_grad for x in probe.batch]
    digest = hashlib.blake2b(digest_size=20)
    for part in (kind, _machine(device), code, gradients):
        digest.update(repr(part).encode())
    digest.update(buffer.getvalue())
    return digest.hexdigest()


class _ContentPickler(pickle.Pickler):
    """Writes shapes and types where tensors stand."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ("tensor", tuple(value.shape), str(value.dtype), value.stride(), value.requires_grad)
        return None


def _code_of(cls: type[nn.Module]) -> str:
    """The code of a module class and its bases, as far as it is Python and not torch's own."""
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
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {_cpu_name()} x{torch.get_num_threads()}"
    return name, torch.__version__, torch.is_autocast_enabled(device.type), torch.get_default_dtype()


@functools.cache
def _cpu_name() -> str:
    """The processor's own name; Linux tells it in a file, others by `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())

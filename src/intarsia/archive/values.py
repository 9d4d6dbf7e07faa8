"""Plain values as JSON: what arguments of operators, options and constants are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from intarsia.errors import ArchiveError

Json = Any
Devices = Callable[[torch.device], torch.device]

# Names that torch itself gives to its constants; a value is found by name among these, never by evaluating.
_CONSTANTS: dict[str, dict[str, Any]] = {
    kind.__name__: {
        str(value).removeprefix("torch."): value
        for value in map(torch.__dict__.__getitem__, sorted(torch.__dict__))
        if isinstance(value, kind)
    }
    for kind in (torch.dtype, torch.layout, torch.memory_format)
}


def same_device(device: torch.device) -> torch.device:
    return device


def to_json(value: Any) -> Json:
    """A value as JSON; ArchiveError for one that has no form there."""
    match value:
        case None | bool() | str():
            return value
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case int() | float() if type(value) in (int, float):
            return value
        case fx.Node():
            return {"node": value.name}
        case list():
            return [to_json(item) for item in value]
        case slice():
            return {"slice": [to_json(part) for part in (value.start, value.stop, value.step)]}
        case tuple() if type(value) in (tuple, torch.Size) or not hasattr(value, "_fields"):
            return {"tuple": [to_json(item) for item in value]}
        case Mapping():
            return {"dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
        case complex():
            return {"complex": [to_json(value.real), to_json(value.imag)]}
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    raise ArchiveError(f"a {type(value).__name__} ({value!r}) has no form in an archive")


def from_json(value: Json, nodes: Mapping[str, fx.Node] | None = None, devices: Devices = same_device) -> Any:
    """The value; nodes are looked up by name."""
    if isinstance(value, list):
        return [from_json(item, nodes, devices) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "node" if nodes is not None:
            return nodes[inner]
        case "float" if inner in ("inf", "-inf", "nan"):
            return float(inner)
        case "tuple":
            return tuple(from_json(item, nodes, devices) for item in inner)
        case "dict":
            return {from_json(k, nodes, devices): from_json(v, nodes, devices) for k, v in inner}
        case "slice":
            return slice(*(from_json(part, nodes, devices) for part in inner))
        case "complex":
            return complex(*(from_json(part) for part in inner))
        case "device":
            return devices(torch.device(str(inner)))
        case "ellipsis":
            return Ellipsis
        case "dtype" | "layout" | "memory_format":
            return _CONSTANTS[kind][inner]
    raise ArchiveError(f"the archive holds a value of the unknown kind {kind!r}")

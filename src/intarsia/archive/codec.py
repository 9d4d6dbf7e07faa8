"""The codec: values as JSON, which are looked up by name and never evaluated.

It writes arguments of operators, options, constants, the pytrees of a call, and signatures. torch's own
reader of pytrees imports the modules of enumerations and default factories that a file names; nothing is
imported here.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from intarsia.capture.output_objects import Opened as Opened  # its import registers the type
from intarsia.errors import ArchiveError

Json = Any
Devices = Callable[[torch.device], torch.device]

# torch's own names of its constants, by which values are looked up.
_CONSTANTS: dict[str, dict[str, Any]] = {
    kind.__name__: {
        str(value).removeprefix("torch."): value
        for value in map(torch.__dict__.__getitem__, sorted(torch.__dict__))
        if isinstance(value, kind)
    }
    for kind in (torch.dtype, torch.layout, torch.memory_format)
}

# torch would import the module that the file names for a default factory.
_IMPORTING = ("collections.defaultdict",)


def same_device(device: torch.device) -> torch.device:
    return device


def to_json(value: Any) -> Json:
    """A value as JSON; ArchiveError for one that cannot be written there."""
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


class Unsaved:
    """A default value that an archive cannot store; nothing equals it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"a {self.kind} that is not saved"


def spec_to_json(spec: pytree.TreeSpec) -> Json:
    """A structure, by the registered names of its types."""
    try:
        version, written = json.loads(pytree.treespec_dumps(spec))
    except (NotImplementedError, TypeError) as error:
        raise ArchiveError(
            f"the structure {spec} has a type without a registered name ({error}); give one to"
            " torch.export.register_dataclass or register_pytree_node as serialized_type_name"
        ) from error
    _check_types(written)
    return [version, written]


def spec_from_json(entry: Json) -> pytree.TreeSpec:
    """The structure; its types must be registered in this process."""
    _check_types(entry[1])
    try:
        return pytree.treespec_loads(json.dumps(entry))
    except NotImplementedError as error:
        raise ArchiveError(
            f"{error} Import the module that defines the type (for models of transformers,"
            " transformers.modeling_outputs and transformers.cache_utils), then load"
        ) from error


def _check_types(entry: Json) -> None:
    if entry["type"] in _IMPORTING or "__enum__" in json.dumps(entry["context"]):
        raise ArchiveError(f"a {entry['type']} with this context has no form in an archive")
    for child in entry["children_spec"]:
        _check_types(child)


def signature_to_json(signature: inspect.Signature | None) -> Json:
    """The names, kinds and defaults of the model's arguments."""
    if signature is None:
        return None
    return [
        [parameter.name, parameter.kind.name, *_default(parameter)]
        for parameter in signature.parameters.values()
    ]


def _default(parameter: inspect.Parameter) -> list[Json]:
    if parameter.default is parameter.empty:
        return []
    try:
        return [to_json(parameter.default)]
    except ArchiveError:
        return [{"unsaved": type(parameter.default).__name__}]


def signature_from_json(entry: Json) -> inspect.Signature | None:
    """The signature, without annotations."""
    if entry is None:
        return None
    return inspect.Signature([_parameter(*item) for item in entry])


def _parameter(name: str, kind: str, *default: Json) -> inspect.Parameter:
    value: Any = inspect.Parameter.empty
    if default:
        unsaved = default[0].get("unsaved") if isinstance(default[0], dict) else None
        value = Unsaved(str(unsaved)) if unsaved is not None else from_json(default[0])
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value)

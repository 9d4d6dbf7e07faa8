"""How a call looks: pytrees by the names they are registered with, and the model's signature.

torch's own reader of pytrees imports modules of enumerations and default factories that the file names.
Nothing is imported here.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from torch.utils import _pytree as pytree

from intarsia.archive.values import Json, from_json, to_json
from intarsia.capture.output_objects import Opened as Opened  # which is registered by it
from intarsia.errors import ArchiveError

# torch would import the module that a file names to find a default factory or an enumeration.
_IMPORTING = ("collections.defaultdict",)


class Unsaved:
    """A default value that has no form in an archive; nothing equals it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"a {self.kind} that is not saved"


def spec_to_json(spec: pytree.TreeSpec) -> Json:
    """A structure, with the registered names of its types."""
    try:
        version, written = json.loads(pytree.treespec_dumps(spec))
    except (NotImplementedError, TypeError) as error:
        raise ArchiveError(
            f"the structure {spec} has a type without a registered name ({error}); give one to"
            " torch.export.register_dataclass or register_pytree_node as serialized_type_name"
        ) from error
    _check_types(written)
    return [version, written]


def spec_from_json(found: Json) -> pytree.TreeSpec:
    """The structure; its types must be registered in this process."""
    _check_types(found[1])
    try:
        return pytree.treespec_loads(json.dumps(found))
    except NotImplementedError as error:
        raise ArchiveError(
            f"{error} Import the module that defines the type (for models of transformers,"
            " transformers.modeling_outputs and transformers.cache_utils), then load"
        ) from error


def _check_types(found: Json) -> None:
    if found["type"] in _IMPORTING or "__enum__" in json.dumps(found["context"]):
        raise ArchiveError(f"a {found['type']} with this context has no form in an archive")
    for child in found["children_spec"]:
        _check_types(child)


def signature_to_json(signature: inspect.Signature | None) -> Json:
    """Names, kinds and defaults of the model's arguments."""
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


def signature_from_json(found: Json) -> inspect.Signature | None:
    """The signature, its annotations left out."""
    if found is None:
        return None
    return inspect.Signature([_parameter(*item) for item in found])


def _parameter(name: str, kind: str, *default: Json) -> inspect.Parameter:
    value: Any = inspect.Parameter.empty
    if default:
        unsaved = default[0].get("unsaved") if isinstance(default[0], dict) else None
        value = Unsaved(str(unsaved)) if unsaved is not None else from_json(default[0])
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value)

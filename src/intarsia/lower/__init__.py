"""Lowering: an ExportedProgram becomes functional ATen with weights as attributes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from intarsia.lower.lowered import GraphInput as GraphInput
from intarsia.lower.lowered import GraphOutput as GraphOutput
from intarsia.lower.lowered import Lowered as Lowered
from intarsia.lower.lowered import Role as Role
from intarsia.lower.purity import pure_operators as pure_operators

if TYPE_CHECKING:
    from intarsia.lower.lowering import lower as lower
    from intarsia.lower.passes import lowering_pass as lowering_pass

# A process that only loads and runs a saved module does not import these.
_HOMES = {"lower": "intarsia.lower.lowering", "lowering_pass": "intarsia.lower.passes"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value

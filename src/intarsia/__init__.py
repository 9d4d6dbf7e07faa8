"""Intarsia: cut a model into pieces, run each on the fastest engine, and call them as one module."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from intarsia.refitting import set_maker as _set_maker

__version__ = "0.1.0"

if TYPE_CHECKING:
    from intarsia.archive import load as load
    from intarsia.archive import save as save
    from intarsia.archive.export import export as export
    from intarsia.capture.annotate import run_on as run_on
    from intarsia.capture.input import Input as Input
    from intarsia.checkpoint import load_pretrained as load_pretrained
    from intarsia.choose import Measured as Measured
    from intarsia.compiler import compile as compile
    from intarsia.convert import ConverterPriority as ConverterPriority
    from intarsia.convert import converter as converter
    from intarsia.convert import enforce_tensor_types as enforce_tensor_types
    from intarsia.engines import OnnxRuntime as OnnxRuntime
    from intarsia.engines import OpenVINO as OpenVINO
    from intarsia.engines import PyTorch as PyTorch
    from intarsia.generation.compile import compile_generation as compile_generation
    from intarsia.lower.decompositions import register_decomposition as register_decomposition
    from intarsia.report import explain as explain
    from intarsia.report.check import check as check
    from intarsia.runtime import Compiled as Compiled
    from intarsia.runtime import PartlyCompiled as PartlyCompiled
    from intarsia.tracing import profile as profile
    from intarsia.tuning.recorded import recording as recording
    from intarsia.tuning.tune import tune as tune

# A process that only loads and runs a saved module needs neither converters nor patterns, so each name is
# imported at its first access.
_HOMES = {
    "run_on": "intarsia.capture.annotate",
    "Input": "intarsia.capture.input",
    "load_pretrained": "intarsia.checkpoint",
    "Measured": "intarsia.choose",
    "compile": "intarsia.compiler",
    "ConverterPriority": "intarsia.convert",
    "converter": "intarsia.convert",
    "enforce_tensor_types": "intarsia.convert",
    "OnnxRuntime": "intarsia.engines",
    "OpenVINO": "intarsia.engines",
    "PyTorch": "intarsia.engines",
    "compile_generation": "intarsia.generation.compile",
    "register_decomposition": "intarsia.lower.decompositions",
    "explain": "intarsia.report",
    "export": "intarsia.archive.export",
    "check": "intarsia.report.check",
    "Compiled": "intarsia.runtime",
    "PartlyCompiled": "intarsia.runtime",
    "load": "intarsia.archive",
    "save": "intarsia.archive",
    "profile": "intarsia.tracing",
    "recording": "intarsia.tuning.recorded",
    "tune": "intarsia.tuning.tune",
}


def _make_refittable(loaded: Any, captured: Any) -> None:
    """Make a loaded module refittable; imports the compiler (see `refitting`)."""
    from intarsia.compiler.loaded import make_refittable

    make_refittable(loaded, captured)


_set_maker(_make_refittable)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
            return value
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{__name__}.{name}")  # `intarsia.engines`, without an import
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""Engines by name and options: those of this process are used, the file only says which.

Options of free text are not carried: those of ONNX Runtime and Inductor can name files to write and compilers
to run.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

from intarsia.archive.values import Json, from_json, to_json
from intarsia.cache.machine import machine_key, package_version, processor_features
from intarsia.engines import Engine, PyTorch, known_engines, resolve_engines
from intarsia.errors import ArchiveError

_PACKAGES = ("onnxruntime", "openvino")
_INSTEAD = "its segments run in PyTorch"
_FREE = "options"  # entries that an engine takes as they are: some name files, or programs to run


def engine_to_json(engine: Engine) -> Json:
    """An engine's options, and the version it was used in; free entries are counted but not carried."""
    if known_engines().get(engine.name) is not type(engine):
        raise ArchiveError(
            f"engine {engine.name!r} is not one that a loading process could find by its name; register it by"
            " an entry point of the group intarsia.engines"
        )
    names: list[str] = (
        [f.name for f in dataclasses.fields(engine)] if dataclasses.is_dataclass(engine) else []
    )
    return {
        "fields": {name: to_json(getattr(engine, name)) for name in names if name != _FREE},
        "free": sorted(map(str, getattr(engine, _FREE, {}))),
        "version": package_version(engine.family if engine.family in _PACKAGES else "torch"),
    }


def packed_for(engine: Engine) -> str:
    """What must be the same where a packed program is used: engine, options, versions, machine."""
    version = package_version(engine.name if engine.name in _PACKAGES else "torch")
    return f"{engine.key()}, {engine.name} {version}, {machine_key()}, {processor_features()}"


def engines_from_json(
    found: Mapping[str, Json],
    asked: Sequence[Engine | str] | Engine | str | None,
    notes: list[str],
    native: bool = False,
) -> dict[str, Engine]:
    """The engines to build on, by name: the user's, or those the file names and that are here.

    If `native`, those that run packages of machine code need not be able to build.
    """
    if asked is not None:
        by_name = {engine.name: engine for engine in resolve_engines(asked)[0]}
        notes += [f"{name}: not among the engines given; {_INSTEAD}" for name in found if name not in by_name]
        return by_name
    usable: dict[str, Engine] = {}
    for name, told in found.items():
        if told["free"]:
            raise ArchiveError(
                f"engine {name!r} was used with options={{{', '.join(told['free'])}}}, which a file may not"
                f" choose; give the engine yourself, with engines=[...]"
            )
        reason = "there is no such engine here"
        if (kind := known_engines().get(name)) is not None:
            usable[name] = kind(**{str(key): from_json(value) for key, value in told["fields"].items()})
            runs = native and getattr(kind, "runs_packages", False)
            reason = "" if runs else usable[name].unavailable() or ""
        if reason:
            usable.pop(name, None)
            notes.append(f"{name}: {reason}; {_INSTEAD}")
            warnings.warn(notes[-1], stacklevel=4)
    return {**usable, "pytorch": PyTorch()}

"""A model compiled in parts as a file: an archive of each part, and what a model must be to take them.

The model's code could be carried only as a pickle or as source text, and either is code. So the user makes
the model, and all weights are compared by digest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn

from intarsia.archive.bundle import check_member, check_weights, weight_digests, write_bundle
from intarsia.archive.container import Reader
from intarsia.archive.load import Place, check_version, load_whole
from intarsia.archive.values import Json
from intarsia.engines import Engine
from intarsia.errors import ArchiveError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled, assembled

PARTS, _VERSION = "intarsia-parts", 1


def save_parts(partly: PartlyCompiled, path: str | os.PathLike[str]) -> None:
    """Write the compiled parts; the rest is the model's own Python code, which no file holds."""
    if not partly.parts:
        raise ArchiveError("nothing of this model is compiled: it runs as it is, by its own Python code")
    programs: dict[str, Compiled] = {}
    parts: dict[str, Json] = {}
    for number, (where, program) in enumerate(partly.parts.items()):
        check_member(where, program)
        member = f"parts/{number}.intarsia"
        programs[member] = program
        parts[where] = {"archive": member, "type": _kind(partly.model.get_submodule(where))}
    manifest = {
        "model": _kind(partly.model),
        "reason": partly.plan.reason,
        "notes": list(partly.own_notes),
        "weights": weight_digests(partly.model),
        "parts": parts,
    }
    write_bundle(path, PARTS, _VERSION, manifest, programs)


def load_parts(
    reader: Reader,
    model: nn.Module | None,
    engines: Sequence[Engine | str] | Engine | str | None,
    map_location: Place | None,
) -> PartlyCompiled:
    """The parts of a file in a copy of `model`, which must be what they were made of, to the weight."""
    manifest = reader.manifest
    check_version(manifest, PARTS, _VERSION)
    if model is None:
        raise ArchiveError(
            f"it holds parts of a {manifest['model']}, whose other modules run by their own Python code,"
            " which no file holds; make that model with the same weights, and give it: load(path, model=...)"
        )
    if _kind(model) != manifest["model"]:
        raise ArchiveError(f"it holds parts of a {manifest['model']}, not of a {_kind(model)}")
    modules = {where: module for where, module in model.named_modules() if where}
    for where, part in manifest["parts"].items():
        kind = _kind(modules[where]) if where in modules else "nothing"
        if kind != part["type"]:
            raise ArchiveError(f"the model has {kind} at {where!r}; the file has a {part['type']} for it")
    check_weights("the model", model, manifest["weights"])
    parts = {
        str(where): load_whole(
            Reader(reader.member(part["archive"])), engines, map_location, False, modules[where]
        )
        for where, part in manifest["parts"].items()
    }
    return assembled(model, parts, [str(note) for note in manifest["notes"]], str(manifest["reason"]))


def _kind(module: nn.Module) -> str:
    return type(module).__qualname__

"""A tuned program as one file: the archives of its modules' programs, and where they belong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from intarsia.errors import ArchiveError
from intarsia.runtime.archive.bundle import check_member, open_bundle, write_bundle
from intarsia.runtime.archive.load import complaining, load_bytes
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.placed import PlacedForward
from intarsia.tuning.holders import held_modules
from intarsia.tuning.tuned import Tuned

_FORMAT, _VERSION = "intarsia-tuned", 1


def save(tuned: Tuned, path: str | os.PathLike[str]) -> None:
    """Write the programs of all tuned modules into one file; a file that fails is not left behind."""
    if not tuned.placed:
        raise ArchiveError("nothing is tuned, so there is nothing to save")
    members: dict[str, Compiled] = {}
    modules: dict[str, list[str]] = {}
    for number, (where, placed) in enumerate(tuned.placed.items()):
        if not placed.is_portable:
            raise ArchiveError(f"{where} generates by programs that share a cache; these are not saved yet")
        for place, program in enumerate(placed.programs):
            assert isinstance(program, Compiled)
            check_member(where, program)
            name = f"modules/{number}.{place}.intarsia"
            members[name] = program
            modules.setdefault(where, []).append(name)
    write_bundle(path, _FORMAT, _VERSION, {"modules": modules}, members)


def load(path: str | os.PathLike[str], target: Any) -> Tuned:
    """Put the programs of a file into the places of `target`, which must have the weights they were made of.

    ArchiveError, and nothing is put in place, where the file or the weights do not fit.
    """
    held = held_modules(target)
    placed: dict[str, PlacedForward] = {}
    with complaining(f"{os.fspath(path)} cannot be loaded"):
        reader = open_bundle(path, _FORMAT, _VERSION)
        for where, names in _modules(reader.manifest).items():
            if where not in held:
                raise ArchiveError(f"it tunes {where}, which this {type(target).__name__} has not")
            programs = [load_bytes(reader.member(name)) for name in names]
            for program in programs:
                _check_weights(where, held[where], program)
            placed[where] = PlacedForward(where, held[where], programs, loaded=True)
    for one in placed.values():
        one.put()
    return Tuned(placed, {})


def _modules(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    modules = manifest.get("modules")
    if not isinstance(modules, dict):
        raise ArchiveError("its list of modules is damaged")
    for where, names in modules.items():
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ArchiveError(f"its list of the programs of {where!r} is damaged")
    return modules


def _check_weights(where: str, module: nn.Module, program: Compiled) -> None:
    mine, theirs = program.state_dict(), module.state_dict()
    if mine.keys() != theirs.keys():
        other = next(iter(mine.keys() ^ theirs.keys()))
        raise ArchiveError(f"{where} has other weights than when it was tuned: {other} is one side's alone")
    for name, tensor in mine.items():
        if tensor.dtype != theirs[name].dtype or not torch.equal(tensor, theirs[name].to(tensor.device)):
            raise ArchiveError(f"{where} has other weights than when it was tuned: {name} differs")
    if module.training:
        raise ArchiveError(f"{where} is in training mode; call eval() on it first")

"""A tuned program as one file: the archives of its modules' programs, and where they belong."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intarsia.errors import ArchiveError
from intarsia.runtime.archive.load import load_bytes
from intarsia.runtime.archive.save import save_bytes
from intarsia.runtime.compiled import Compiled
from intarsia.tuning.holders import held_modules
from intarsia.tuning.placed import PlacedForward
from intarsia.tuning.tuned import Tuned

_INDEX, _FORMAT, _VERSION = "set.json", "intarsia-tuned", 1


def save(tuned: Tuned, path: str | os.PathLike[str]) -> None:
    """Write the programs of all tuned modules into one file; a file that fails is not left behind."""
    if not tuned.placed:
        raise ArchiveError("nothing is tuned, so there is nothing to save")
    members: dict[str, bytes] = {}
    modules: dict[str, list[str]] = {}
    for number, (where, placed) in enumerate(tuned.placed.items()):
        for place, program in enumerate(placed.programs):
            if program.lowered.buffers:
                changed = ", ".join(program.lowered.buffers)
                raise ArchiveError(f"{where} changes its buffers ({changed}), which a file cannot share")
            name = f"modules/{number}.{place}.intarsia"
            members[name] = save_bytes(program)
            modules.setdefault(where, []).append(name)
    index = {"format": _FORMAT, "version": _VERSION, "modules": modules}
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
            file.writestr(zipfile.ZipInfo(_INDEX), json.dumps(index, indent=1))
            for name, data in members.items():
                file.writestr(zipfile.ZipInfo(name), data)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], target: Any) -> Tuned:
    """Put the programs of a file into the places of `target`, which must have the weights they were made of.

    ArchiveError, and nothing is put in place, where the file or the weights do not fit.
    """
    held = held_modules(target)
    placed: dict[str, PlacedForward] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for where, names in _index(file).items():
                if where not in held:
                    raise ArchiveError(f"{path} tunes {where}, which this {type(target).__name__} has not")
                programs = [load_bytes(file.read(name)) for name in names]
                for program in programs:
                    _check_weights(where, held[where], program)
                placed[where] = PlacedForward(where, held[where], programs, loaded=True)
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArchiveError(f"{path} is damaged, or no file of tuned modules: {error}") from error
    for one in placed.values():
        one.put()
    return Tuned(placed, {})


def _index(file: zipfile.ZipFile) -> dict[str, list[str]]:
    index = json.loads(file.read(_INDEX))
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise ArchiveError("it is no file of tuned modules")
    if index.get("version") != _VERSION:
        raise ArchiveError(f"it has version {index.get('version')!r}; this package reads {_VERSION}")
    modules = index.get("modules")
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

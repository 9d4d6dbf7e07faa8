"""A tuned program as one file: the archives of its modules' programs, and where they belong."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from intarsia.archive.bundle import (
    check_member,
    check_weights,
    open_bundle,
    weight_digests,
    write_bundle,
)
from intarsia.archive.container import Reader
from intarsia.archive.load import complaining, load_bytes
from intarsia.archive.values import Json
from intarsia.build.judge import Call
from intarsia.errors import ArchiveError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.placed import PlacedForward
from intarsia.tuning.examples import fault_of, pack_example, unpack_example
from intarsia.tuning.holders import held_modules
from intarsia.tuning.tuned import Tuned

if TYPE_CHECKING:
    from intarsia.generation.forward import GeneratingForward

_FORMAT, _VERSION = "intarsia-tuned", 3


def save(tuned: Tuned, path: str | os.PathLike[str]) -> None:
    """Write the programs of all tuned modules into one file; a file that fails is not left behind."""
    if not tuned.placed:
        raise ArchiveError("nothing is tuned, so there is nothing to save")
    members: dict[str, Compiled] = {}
    modules: dict[str, list[str]] = {}
    examples: dict[str, Json] = {}
    tensors: dict[str, bytes] = {}
    generating: dict[str, Json] = {}
    for number, (where, placed) in enumerate(tuned.placed.items()):
        if _generates(placed):
            from intarsia.generation.archive import packed

            generating[where], found = packed(placed, f"modules/{number}.")
            members.update(found)
            continue
        for place, program in enumerate(placed.programs):
            assert isinstance(program, Compiled)
            check_member(where, program)
            name = f"modules/{number}.{place}.intarsia"
            members[name] = program
            modules.setdefault(where, []).append(name)
            if (call := placed.examples.get(id(program))) is not None:
                held = f"{name}.safetensors"
                examples[name], tensors[held] = pack_example(placed, program, call, held)
    weights: dict[str, Json] = {where: weight_digests(one.module) for where, one in tuned.placed.items()}
    told: dict[str, Json] = {"modules": dict(modules), "generating": generating, "weights": weights}
    write_bundle(path, _FORMAT, _VERSION, {**told, "examples": examples}, members, tensors)


def load(path: str | os.PathLike[str], target: Any) -> Tuned:
    """Put the programs of a file into the places of `target`, which must have the weights they were made of.

    Each is run on the call that it was verified on, and must answer as its module. ArchiveError, and nothing
    is put in place, where the file, the weights or the answers do not fit.
    """
    held = held_modules(target)
    placed: dict[str, PlacedForward] = {}
    with complaining(f"{os.fspath(path)} cannot be loaded"):
        reader = open_bundle(path, _FORMAT, _VERSION)
        modules, generating = _modules(reader.manifest), reader.manifest["generating"]
        for where in (*modules, *generating):
            if where not in held:
                raise ArchiveError(f"it tunes {where}, which this {type(target).__name__} has not")
            check_weights(where, held[where], reader.manifest["weights"][where])
            if held[where].training:
                raise ArchiveError(f"{where} is in training mode; call eval() on it first")
        for where, told in generating.items():
            from intarsia.generation.archive import unpacked

            placed[where], _ = unpacked(where, held[where], told, reader.member)
        for where, names in modules.items():
            found = [_program(where, held[where], name, reader) for name in names]
            programs, calls = [program for program, _ in found], [call for _, call in found]
            placed[where] = PlacedForward(where, held[where], programs, calls)
    for one in placed.values():
        one.put()
    unseen = [where for where in modules if None in placed[where].examples.values()]
    reason = "was not compared with its programs: the file is an older one, without calls to do so"
    return Tuned(placed, {}, notes=[f"{where} {reason}" for where in unseen])


def _program(where: str, module: nn.Module, name: str, reader: Reader) -> tuple[Compiled, Call | None]:
    """A program, and the call on which it answers as the module does; files of old have no call."""
    program, told = load_bytes(reader.member(name)), (reader.manifest.get("examples") or {}).get(name)
    if told is None:
        return program, None
    call = unpack_example(program, told, reader.member)
    fault = fault_of(module, program, call, float(told["error"]))
    if fault is not None:
        raise ArchiveError(f"{where} is another module than when it was saved: the program {fault}")
    return program, call


def _modules(manifest: Mapping[str, Any]) -> dict[str, list[str]]:
    modules = manifest.get("modules")
    if not isinstance(modules, dict):
        raise ArchiveError("its list of modules is damaged")
    for where, names in modules.items():
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ArchiveError(f"its list of the programs of {where!r} is damaged")
    return modules


def _generates(placed: PlacedForward) -> TypeGuard[GeneratingForward]:
    if "intarsia.generation.forward" not in sys.modules:  # it imports transformers
        return False
    from intarsia.generation.forward import GeneratingForward

    return isinstance(placed, GeneratingForward)

"""Saving a tuned program: the programs of its modules, and the calls to compare them on when it is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn
from torch.utils import _pytree as pytree

from intarsia.archive.codec import Json
from intarsia.archive.files import check_shareable, check_weights, weight_digests
from intarsia.archive.reader import Bundle, complaining, open_bundle
from intarsia.archive.writer import BundleWriter
from intarsia.build.judge import Call, Example, Judge, judged_example, whole_fault
from intarsia.compare import relative_error
from intarsia.engines import short_engines
from intarsia.errors import ArchiveError
from intarsia.lower.lowered import example_inputs
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.forwards import PlacedForward
from intarsia.tuning.recorded import held_modules
from intarsia.tuning.tune import Tuned

if TYPE_CHECKING:
    from intarsia.generation.forward import GeneratingForward


_FORMAT, _VERSION = "intarsia-tuned", 4


def _example_to_json(
    placed: PlacedForward, program: Compiled, call: Call, bundle: BundleWriter
) -> dict[str, Json]:
    """A call, and the error of the program's answer to it."""
    judge = Judge(placed.module)
    ours, truth = (judge.answer(call, answering).leaves for answering in (program, placed.own))
    args, kwargs = call
    flat = program.flatten(tuple(args), dict(kwargs))
    return {"leaves": bundle.leaves(flat), "error": relative_error(ours, truth)}


def _fault(module: nn.Module, program: Compiled, call: Call, error: float) -> str | None:
    """How a program's answer differs from the module's, in a clause.

    In shorter arithmetic, an answer may have up to twice the stored `error`.
    """
    judge, lowered = Judge(module), program.lowered
    try:
        example = judged_example(judge, lowered, Example(call, example_inputs(lowered, *call)))
    except Exception as raised:
        raise ArchiveError(
            f"it fails on the call that it was tuned with: {type(raised).__name__}: {raised}"
        ) from raised
    is_short = any(name in short_engines() for name in program.plan.engines)
    return whole_fault(judge, lowered, program, [example], 0.0, 2 * error if is_short else None)


def save(tuned: Tuned, path: str | os.PathLike[str]) -> None:
    """Write the programs of all tuned modules into one file. If saving fails, no file remains."""
    if not tuned.placed:
        raise ArchiveError("nothing is tuned, so there is nothing to save")
    bundle = BundleWriter()
    modules: dict[str, list[Json]] = {}
    generating: dict[str, Json] = {}
    for where, placed in tuned.placed.items():
        if _generates(placed):
            from intarsia.generation.archive import forward_to_json

            generating[where] = forward_to_json(placed, bundle)
            continue
        modules[where] = []
        for number, program in enumerate(placed.programs):
            assert isinstance(program, Compiled)
            check_shareable(where, program)
            call = placed.examples.get(id(program))
            entry = {
                "program": bundle.add(f"{where} {number}", program),
                "example": None if call is None else _example_to_json(placed, program, call, bundle),
            }
            modules[where].append(entry)
    weights: dict[str, Json] = {where: weight_digests(one.module) for where, one in tuned.placed.items()}
    bundle.write(path, _FORMAT, _VERSION, {"modules": modules, "generating": generating, "weights": weights})


def load(path: str | os.PathLike[str], target: Any) -> Tuned:
    """Put the programs of a file into the modules of `target`, which must have the weights of the compile.

    Each program runs on a stored call and must answer as its module. If the file, the weights or an answer
    does not fit, ArchiveError is raised and nothing is changed.
    """
    own_modules = held_modules(target)
    placed: dict[str, PlacedForward] = {}
    complaint = f"{os.fspath(path)} cannot be loaded"
    with complaining(complaint), open_bundle(path, _FORMAT, _VERSION) as bundle:
        modules, generating = _modules(bundle.manifest), bundle.manifest["generating"]
        for where in (*modules, *generating):
            if where not in own_modules:
                raise ArchiveError(f"it tunes {where}, which this {type(target).__name__} does not have")
            check_weights(where, own_modules[where], bundle.manifest["weights"][where])
            if own_modules[where].training:
                raise ArchiveError(f"{where} is in training mode; call eval() on it first")
        for where, description in generating.items():
            from intarsia.generation.archive import forward_from_json

            placed[where], _ = forward_from_json(where, own_modules[where], description, bundle)
        for where, entries in modules.items():
            pairs = [_program(where, own_modules[where], entry, bundle) for entry in entries]
            programs, calls = [program for program, _ in pairs], [call for _, call in pairs]
            placed[where] = PlacedForward(where, own_modules[where], programs, calls)
    for one in placed.values():
        one.put()
    unseen = [where for where in modules if None in placed[where].examples.values()]
    reason = "was not compared with its programs, because the file has no calls"
    return Tuned(placed, {}, notes=[f"{where} {reason}" for where in unseen])


def _program(
    where: str, module: nn.Module, entry: Mapping[str, Json], bundle: Bundle
) -> tuple[Compiled, Call | None]:
    """A program, and the stored call on which it answers as the module; None if the file has no call."""
    program, example = bundle.program(entry["program"]), entry["example"]
    if example is None:
        return program, None
    call: Call = pytree.tree_unflatten(bundle.leaves(example["leaves"]), program.lowered.in_spec)
    fault = _fault(module, program, call, float(example["error"]))
    if fault is not None:
        raise ArchiveError(f"{where} has changed since it was saved: the program {fault}")
    return program, call


def _modules(manifest: Mapping[str, Any]) -> dict[str, list[Json]]:
    modules = manifest.get("modules")
    if not isinstance(modules, dict):
        raise ArchiveError("its list of modules is damaged")
    for where, entries in modules.items():
        if not isinstance(entries, list) or not entries:
            raise ArchiveError(f"its list of the programs of {where!r} is damaged")
    return modules


def _generates(placed: PlacedForward) -> TypeGuard[GeneratingForward]:
    if "intarsia.generation.forward" not in sys.modules:  # it imports transformers
        return False
    from intarsia.generation.forward import GeneratingForward

    return isinstance(placed, GeneratingForward)

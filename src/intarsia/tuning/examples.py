"""The calls that programs were verified on, kept with them, so that who loads them verifies them again.

Weights do not tell all of a module: the same ones fit another activation, or another number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from intarsia.archive.codec import Json
from intarsia.archive.reader import Bundle
from intarsia.archive.writer import BundleWriter
from intarsia.build.faithful import Example, judged_example, whole_fault
from intarsia.build.judge import Call, Judge
from intarsia.compare import relative_error
from intarsia.engines import short_engines
from intarsia.errors import ArchiveError
from intarsia.lower.lowered import example_inputs
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.placed import PlacedForward


def example_to_json(
    placed: PlacedForward, program: Compiled, call: Call, bundle: BundleWriter
) -> dict[str, Json]:
    """A call, and how far the program's answer to it is from the module's own."""
    judge = Judge(placed.module)
    ours, truth = (judge.answer(call, answering).leaves for answering in (program, placed.own))
    args, kwargs = call
    flat = program.flatten(tuple(args), dict(kwargs))
    return {"leaves": bundle.leaves(flat), "error": relative_error(ours, truth)}


def example_from_json(program: Compiled, example: Mapping[str, Any], bundle: Bundle) -> Call:
    """The call that `example_to_json` wrote."""
    call: Call = pytree.tree_unflatten(bundle.leaves(example["leaves"]), program.lowered.in_spec)
    return call


def fault_of(module: nn.Module, program: Compiled, call: Call, error: float) -> str | None:
    """How a program answers unlike a module, in a clause; in shorter arithmetic it may be off as it was."""
    judge, lowered = Judge(module), program.lowered
    try:
        example = judged_example(judge, lowered, Example(call, example_inputs(lowered, *call)))
    except Exception as raised:
        raise ArchiveError(
            f"it fails on the call that it was tuned with: {type(raised).__name__}: {raised}"
        ) from raised
    is_short = any(name in short_engines() for name in program.plan.engines)
    return whole_fault(judge, lowered, program, [example], 0.0, 2 * error if is_short else None)

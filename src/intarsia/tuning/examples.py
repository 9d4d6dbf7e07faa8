"""The calls that programs were verified on, kept with them, so that who loads them verifies them again.

Weights do not tell all of a module: the same ones fit another activation, or another number of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.archive.values import Json, from_json, to_json
from intarsia.build.faithful import Example, judged_example, whole_fault
from intarsia.build.judge import Call, Judge
from intarsia.compare import relative_error
from intarsia.engines import short_engines
from intarsia.errors import ArchiveError
from intarsia.lower.lowered import example_inputs
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.placed import PlacedForward


def pack_example(
    placed: PlacedForward, program: Compiled, call: Call, member: str
) -> tuple[dict[str, Json], bytes]:
    """What a manifest says of a call, its tensors being in a `member`, and those tensors."""
    args, kwargs = call
    flat = program.flatten(tuple(args), dict(kwargs))
    kept = [(str(n), leaf.detach().cpu()) for n, leaf in enumerate(flat) if _is_tensor(leaf)]
    tensors = {name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in kept}
    others: dict[str, Json] = {str(n): to_json(leaf) for n, leaf in enumerate(flat) if not _is_tensor(leaf)}
    judge = Judge(placed.module)
    ours, truth = (judge.answer(call, answering).leaves for answering in (program, placed.own))
    return {"tensors": member, "others": others, "error": relative_error(ours, truth)}, save(tensors)


def unpack_example(program: Compiled, told: Mapping[str, Any], read: Callable[[str], Any]) -> Call:
    """The call that `pack_example` wrote, on the devices that the program runs on."""
    tensors = load(bytes(read(told["tensors"])))
    leaves: list[Any] = []
    for place, check in enumerate(program.checks):
        held = tensors.get(str(place))
        if held is None:
            leaves.append(from_json(told["others"][str(place)]))
        else:
            leaves.append(held.to(getattr(check, "device", held.device)))
    call: Call = pytree.tree_unflatten(leaves, program.lowered.in_spec)
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


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)

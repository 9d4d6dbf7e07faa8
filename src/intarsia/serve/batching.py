"""Whether requests may share a call, and up to how many rows; with the reason where they may not.

A trial alone cannot tell a mean over the batch that happens to be small, or a branch that the trial does not
take. So the graph must show that rows are apart; a trial comes on top, for the engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from intarsia.compare import disagreement
from intarsia.errors import IntarsiaError, first_line
from intarsia.graph.rows import mixing
from intarsia.serve.interface import Interface


@dataclass(frozen=True)
class Batching:
    """Requests share calls of up to `rows` rows; or, where that is 0, none do, and why."""

    rows: int
    why_not: str = ""

    def __str__(self) -> str:
        return f"up to {self.rows} rows a call" if self.rows else f"off: {self.why_not}"


def decide(interface: Interface, most: int) -> Batching:
    """Batching as far as the module is known to compute every row by itself.

    The first axis of every input must be one size that varies; the graph must keep rows apart; and a batch,
    run, must answer as its rows do alone.
    """
    if most < 2:
        return Batching(0, "it is off")
    symbol = _batch_symbol(interface)
    if isinstance(symbol, str):
        return Batching(0, symbol)
    low, high = interface.symbols()[symbol]
    if high < 2:
        return Batching(0, f"the module was compiled for at most {high} rows")
    first = max(low, 2)
    calls = [(rows, _flat(interface, {**interface.usual(), symbol: rows})) for rows in (first, first + 1)]
    reason = mixing(interface.compiled.lowered.module, calls)
    if reason is not None:
        return Batching(0, reason)
    if 2 * first <= high:
        reason = _tried(interface, {**interface.usual(), symbol: 2 * first}, first)
    return Batching(min(most, high)) if reason is None else Batching(0, reason)


def _batch_symbol(interface: Interface) -> Any:
    """The size that is the batch's, or a clause that says why there is none."""
    if not interface.inputs:
        return "the module takes no tensor"
    if interface.stateful:
        return "a call changes the module's buffers or its inputs"
    refusals: dict[Any, str] = {}
    for name, check in interface.inputs.items():
        if not check.shape or isinstance(check.shape[0], int) or check.shape[0].is_Integer:
            return f"the first axis of input {name} was compiled with a fixed size; compile it with a range"
        if not check.shape[0].is_Symbol or any(
            check.shape[0] in getattr(d, "free_symbols", ()) for d in check.shape[1:]
        ):
            return f"the first axis of input {name} is tied to another size"
        if check.strides is not None:
            return f"the module reads input {name} by its strides"
        refusals[check.shape[0]] = name
    if len(refusals) > 1:
        return f"the first axes of inputs {' and '.join(refusals.values())} vary each by itself"
    return next(iter(refusals))


def _flat(interface: Interface, sizes: dict[Any, int]) -> list[Any]:
    """The inputs of the graph at some sizes: zeros, constants where the graph has them."""
    values = iter(interface.example(sizes).values())
    return [
        item.constant if item.is_constant else next(values).to(_device(interface))
        for item in interface.compiled.lowered.inputs
    ]


def _device(interface: Interface) -> torch.device:
    return next(iter(interface.inputs.values())).device


def _tried(interface: Interface, sizes: dict[Any, int], half: int) -> str | None:
    """A batch at once against its halves: what the graph promises, seen of the engines too."""
    example = interface.example(sizes, torch.Generator().manual_seed(0))
    try:
        together = interface.call(example)
        halves = [
            interface.call({name: value[at : at + half] for name, value in example.items()})
            for at in (0, half)
        ]
    except (IntarsiaError, RuntimeError, ValueError, IndexError) as error:
        return f"the module does not run on {2 * half} rows and on {half} ({first_line(error)})"
    expected = [joined([answer[name] for answer in halves]) for name in interface.outputs]
    wrong = disagreement([together[name] for name in interface.outputs], expected)
    return None if wrong is None else f"a batch differs from its rows computed one by one: {wrong}"


def joined(parts: Sequence[Any]) -> Any:
    """Rows one after the other; what is not a tensor is the same for all."""
    return torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def split(outputs: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Each request's own rows of what a batch gave."""
    total, parts, at = sum(sizes), [], 0
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and (not value.dim() or value.shape[0] != total):
            raise RuntimeError(f"output {name} has the shape {tuple(value.shape)} for {total} rows")
    for size in sizes:
        parts.append({n: v[at : at + size] if isinstance(v, torch.Tensor) else v for n, v in outputs.items()})
        at += size
    return parts

"""Whether requests may share a call, and the number of rows in a call, or the reason why they may not.

A trial cannot detect a small mean over the batch, or a branch that it does not take. So the graph must show
that rows are independent. A trial then checks the engines.
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
    """Requests share calls of up to `rows` rows. If `rows` is 0, they do not, and `why_not` is the reason."""

    rows: int
    why_not: str = ""

    def __str__(self) -> str:
        return f"up to {self.rows} rows per call" if self.rows else f"off: {self.why_not}"


def decide(interface: Interface, most: int) -> Batching:
    """The batching of up to `most` rows, if the module computes every row independently.

    The first axis of every input must be the same dynamic size, rows must be independent in the graph, and
    the outputs of a batch must be equal to those of its rows.
    """
    if most < 2:
        return Batching(0, "max_batch is 1")
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
        reason = _trial(interface, {**interface.usual(), symbol: 2 * first}, first)
    return Batching(min(most, high)) if reason is None else Batching(0, reason)


def _batch_symbol(interface: Interface) -> Any:
    """The symbol of the batch size, or the reason why there is none."""
    if not interface.inputs:
        return "the module takes no tensor"
    if interface.stateful:
        return "a call changes the module's buffers or its inputs"
    input_of: dict[Any, str] = {}
    for name, check in interface.inputs.items():
        if not check.shape or isinstance(check.shape[0], int) or check.shape[0].is_Integer:
            return f"the first axis of input {name} was compiled with a fixed size; compile it with a range"
        if not check.shape[0].is_Symbol or any(
            check.shape[0] in getattr(d, "free_symbols", ()) for d in check.shape[1:]
        ):
            return f"the first axis of input {name} is tied to another size"
        if check.strides is not None:
            return f"the module reads input {name} by its strides"
        input_of[check.shape[0]] = name
    if len(input_of) > 1:
        return f"the first axes of inputs {' and '.join(input_of.values())} are different sizes"
    return next(iter(input_of))


def _flat(interface: Interface, sizes: dict[Any, int]) -> list[Any]:
    """The inputs of the graph with these sizes: zeros, and the constants of the graph."""
    device = next(iter(interface.inputs.values())).device
    values = iter(interface.example(sizes).values())
    return [
        item.constant if item.is_constant else next(values).to(device)
        for item in interface.compiled.lowered.inputs
    ]


def _trial(interface: Interface, sizes: dict[Any, int], half: int) -> str | None:
    """How the outputs of a batch differ from those of its halves, or None."""
    example = interface.example(sizes, torch.Generator().manual_seed(0))
    try:
        together = interface.call(example)
        halves = [
            interface.call({name: value[at : at + half] for name, value in example.items()})
            for at in (0, half)
        ]
    except (IntarsiaError, RuntimeError, ValueError, IndexError) as error:
        return f"the module does not run on {2 * half} rows and on {half} ({first_line(error)})"
    expected = [joined([outputs[name] for outputs in halves]) for name in interface.outputs]
    difference = disagreement([together[name] for name in interface.outputs], expected)
    return None if difference is None else f"a batch differs from its rows: {difference}"


def joined(parts: Sequence[Any]) -> Any:
    """The concatenated rows of tensors; a value that is not a tensor is the same in all parts."""
    return torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def split(outputs: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The outputs of each request, from the outputs of a batch."""
    total, parts, at = sum(sizes), [], 0
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and (not value.dim() or value.shape[0] != total):
            raise RuntimeError(f"output {name} has the shape {tuple(value.shape)} for {total} rows")
    for size in sizes:
        parts.append({n: v[at : at + size] if isinstance(v, torch.Tensor) else v for n, v in outputs.items()})
        at += size
    return parts

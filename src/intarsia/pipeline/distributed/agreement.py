"""What all ranks agree on before a step: the batch's lengths, the precision, and how much its loss counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intarsia.errors import InputError
from intarsia.pipeline.distributed.batch import divide, divide_target
from intarsia.pipeline.distributed.loss import MicrobatchLoss
from intarsia.pipeline.distributed.precision import Precision, current_precision
from intarsia.pipeline.distributed.world import World
from intarsia.pipeline.stages.signature import CallSignature

_PRECISIONS: tuple[Precision, ...] = (None, torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class AgreedBatch:
    """One rank's batch: tensors on the first, targets on the last, the lengths of a micro-batch on all."""

    tensors: Sequence[Tensor]
    targets: Sequence[Any]
    weights: Sequence[float]  # how much the loss of each micro-batch counts
    total: float  # the sum of all weights, of every replica
    lengths: dict[str, int]


@dataclass(frozen=True)
class Terms:
    """What a rank needs to know to agree: how calls look, who takes part, and which part it plays."""

    signature: CallSignature
    world: World
    n_microbatches: int
    device: torch.device
    first: int  # the rank that takes inputs, and the one that takes targets
    last: int


def agree(
    terms: Terms, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss: MicrobatchLoss | None
) -> AgreedBatch:
    """Let every rank of every replica know this batch's lengths and weights, or that some rank refused it."""
    names = sorted(terms.signature.example)
    tensors: list[Tensor] = []
    targets: list[Any] = []
    weights: list[float] = []
    lengths: dict[str, int] = {}
    refusal: Exception | None = None
    try:
        if terms.world.rank == terms.first:
            given = terms.signature.flatten(args, kwargs)
            tensors, lengths = divide(terms.signature, given, terms.n_microbatches, terms.device)
        if terms.world.rank == terms.last and loss is not None:
            targets = divide_target(target, terms.n_microbatches)
            weights = loss.weigh(targets)
    except Exception as error:
        refusal = error
    precision = _PRECISIONS.index(current_precision(terms.device))
    known = float(loss is not None and bool(targets) and loss.knows(targets[0]))
    numbers = [
        float(refusal is not None),
        precision,
        sum(weights),
        known,
        *(lengths.get(n, -1) for n in names),
    ]
    gathered = {
        rank: told.tolist()
        for rank, told in terms.world.gather(
            torch.tensor(numbers, dtype=torch.float64, device=terms.device)
        ).items()
    }
    if refusal is not None:
        raise refusal
    for rank, told in gathered.items():
        if told[0]:
            raise InputError(f"rank {rank} refused this batch; its own error says why")
        if int(told[1]) != precision:
            mine, other = (_autocast(_PRECISIONS[p]) for p in (precision, int(told[1])))
            raise InputError(f"rank {terms.world.me} steps {mine}, but rank {rank} {other}")
    agreed = _lengths(terms, gathered, names)
    total = sum(gathered[row[terms.last]][2] for row in terms.world.table)
    return AgreedBatch(tensors, targets, weights, total, agreed)


def _lengths(terms: Terms, gathered: dict[int, list[float]], names: Sequence[str]) -> dict[str, int]:
    """The lengths of this replica's batch; replicas of unequal batches are refused where it would show."""
    batch = terms.signature.batch
    found = [
        {n: int(v) for n, v in zip(names, gathered[row[terms.first]][4:], strict=True)}
        for row in terms.world.table
    ]
    weighed = all(gathered[row[terms.last]][3] for row in terms.world.table)
    sizes = [lengths.get(str(batch), 0) for lengths in found]
    if len(set(sizes)) > 1 and not weighed:
        counts = ", ".join(str(s * terms.n_microbatches) for s in sizes)
        raise InputError(
            f"the replicas step over {counts} samples; a mean over all of them needs equal parts, or"
            " loss_weight= that says how much each counts"
        )
    return found[terms.world.replica]


def _autocast(precision: Precision) -> str:
    return "without autocast" if precision is None else f"under autocast to {precision}"

"""Weights of one rank's stages, read from files by that rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from intarsia.errors import InputError
from intarsia.pipeline.distributed.saved import is_checkpoint
from intarsia.pipeline.distributed.world import World
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.weights import Weights, load_stages, memory_for_stages


def materialise(
    stages: StageSequence, weights: Weights, held: Sequence[int], device: torch.device, world: World
) -> None:
    """Give the `held` stages memory, and their weights from safetensors; refused on every rank if on one.

    For a checkpoint of torch.distributed.checkpoint only the memory is made: reading it is for all ranks.
    """
    refusal = ""
    try:
        if is_checkpoint(weights.path):
            memory_for_stages(stages, weights.buffers, held, device)
        else:
            load_stages(stages, weights, held, device)
    except InputError as error:
        refusal = str(error)
    told = world.gather(torch.tensor([int(bool(refusal))], device=device))
    refused = [rank for rank, word in told.items() if int(word)]
    if refused:
        raise InputError(refusal or f"rank {refused[0]} could not load its weights; its own error says why")


def weights_of(given: str | Path | Weights | None) -> Weights | None:
    """The weights a user named, by path or in full."""
    return given if given is None or isinstance(given, Weights) else Weights(given)

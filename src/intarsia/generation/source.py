"""What the encoder of a model reads: tokens of any number, or sound of one length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from intarsia.errors import InputError


@dataclass(frozen=True)
class Source:
    """What an encoder is given, and how many states of it a decoder attends to."""

    argument: str  # of the encoder's forward
    states: int  # at most; where `fixed`, always
    fixed: bool  # always of that length, and without padding
    shape: tuple[int, ...]  # of one row of what it reads, at most
    hidden: int  # size of a state
    result: Callable[..., Any]  # the class of what the encoder returns

    def example(self, rows: int, length: int, device: torch.device) -> torch.Tensor:
        """So many rows to read: tokens 1, 2, 3 ..., or noise."""
        if self.fixed:
            drawn = torch.randn(rows, *self.shape, generator=torch.Generator().manual_seed(0))
            return drawn.to(device=device)
        return torch.arange(1, length + 1, device=device).expand(rows, length).contiguous()


def source_of(model: Any, max_length: int, max_source: int | None) -> Source | None:
    """What a model's encoder reads; None for a decoder; InputError where it is nothing that can be served."""
    config = model.config
    if not getattr(config, "is_encoder_decoder", False):
        if max_source is not None:
            raise InputError(f"max_source is {max_source}, and {type(model).__name__} has no encoder")
        return None
    argument = model.main_input_name
    if argument == "input_features" and hasattr(config, "max_source_positions"):
        states = int(config.max_source_positions)
        if max_source not in (None, states):
            raise InputError(f"max_source is {max_source}, and {type(model).__name__} reads {states} always")
        shape: tuple[int, ...] = (int(config.num_mel_bins), 2 * states)
    elif argument == "input_ids":
        limit = getattr(config, "max_position_embeddings", None)
        states = max_source or min(max_length, limit or max_length)
        shape = (states,)
    else:
        raise InputError(
            f"the encoder of {type(model).__name__} reads {argument}; served are tokens and sound"
        )
    fixed = argument == "input_features"
    given = torch.zeros(1, *shape, dtype=model.dtype if fixed else torch.long, device=model.device)
    try:
        with torch.no_grad():
            made = model.get_encoder()(**{argument: given}, return_dict=True)
    except (IndexError, ValueError) as error:
        raise InputError(
            f"the encoder of {type(model).__name__} reads no {states} tokens: {error}"
        ) from error
    found = tuple(made.last_hidden_state.shape)
    if found[:2] != (1, states):
        raise InputError(f"the encoder of {type(model).__name__} makes {found[1]} states of {states} tokens")
    return Source(argument, states, fixed, shape, int(found[2]), type(made))

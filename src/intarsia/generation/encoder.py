"""The forward of an encoder, with a compiled program for tokens or audio features.

The keys and values of the encoder's states are computed by the decoder's program for prompts, since a model
computes them in the decoder's layers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from intarsia.errors import InputError
from intarsia.generation.anatomy import Anatomy, Source
from intarsia.generation.call import arguments
from intarsia.generation.masks import source_mask
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled
from intarsia.runtime.placed import PlacedForward


class EncoderForward(PlacedForward):
    """An encoder's `forward`: a program without and one with padding. Other calls use the encoder's own."""

    asks_weights = True

    def __init__(
        self,
        encoder: nn.Module,
        anatomy: Anatomy,
        source: Source,
        plain: Compiled | PartlyCompiled,
        masked: Compiled | PartlyCompiled | None,
    ) -> None:
        super().__init__(type(encoder).__name__, encoder)
        self.anatomy: Anatomy = anatomy
        self.source: Source = source
        self.plain: Compiled | PartlyCompiled = plain
        self.masked: Compiled | PartlyCompiled | None = masked
        self.runs["encoder"] = 0

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config: Any = self.module.config
        named = arguments(inspect.signature(self), config, args, kwargs)
        value, mask = named.pop(self.source.argument, None), named.pop("attention_mask", None)
        returns_dict = named.pop("return_dict", getattr(config, "return_dict", True))
        if strange := [name for name in named if name != "use_cache"]:
            raise InputError(f"{strange[0]} is passed, which is not supported")
        if not isinstance(value, torch.Tensor) or value.device != self.anatomy.device:
            raise InputError(f"{self.source.argument} is missing or not on {self.anatomy.device}")
        masks: list[torch.Tensor] = []
        if mask is not None and not self.source.fixed:
            if tuple(mask.shape) != tuple(value.shape):
                raise InputError(
                    f"its attention_mask is {tuple(mask.shape)}, and its {self.source.argument} are"
                    f" {tuple(value.shape)}"
                )
            seen = mask != 0
            if not bool(seen.any(-1).all()):
                raise InputError("one of its rows is padding only")
            if not bool(seen.all()):
                masks = [source_mask(seen, room=None, dtype=self.anatomy.mask_dtype)]
        program = self.masked if masks else self.plain
        if program is None:
            raise InputError("it has padding; compiled without padding (padding=True allows it)")
        result = self.source.result(last_hidden_state=_states(program, [value.contiguous(), *masks]))
        self.runs["encoder"] += 1
        return result if returns_dict else result.to_tuple()


def _states(program: Compiled | PartlyCompiled, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The result of a program. One row is passed twice if the program needs several."""
    try:
        states: torch.Tensor = program(*inputs)
    except InputError:
        if inputs[0].shape[0] != 1:
            raise
        states = program(*(torch.cat([tensor, tensor]) for tensor in inputs))[:1]
    return states

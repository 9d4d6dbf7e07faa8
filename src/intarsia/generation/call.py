"""The arguments of a forward call; InputError if no program is compiled for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from intarsia.errors import InputError
from intarsia.generation.anatomy import Anatomy, new_cache

_OTHERS = ("past_key_values", "use_cache", "return_dict")
_OF_DECODER = ("input_ids", "attention_mask", "position_ids")
_IF_FALSE = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True)
class Call:
    """A call of the forward of a decoder, with an encoder's states or without."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    cache: Cache
    returns_dict: bool
    logit_count: int  # of the last tokens; 0 for all
    encoded: tuple[Any, ...] = ()  # an encoder's states, and its hidden states and attentions or None
    source_mask: torch.Tensor | None = None


def arguments(
    signature: inspect.Signature, config: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a forward by name, without those that are None or False."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(str(error)) from error  # the model's own forward raises it, too
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    named = {name: value for name, value in named.items() if value is not None}
    for name in _IF_FALSE:
        if named.pop(name, getattr(config, name, False)):
            raise InputError(f"{name} is requested")
    return named


def parsed(model: Any, anatomy: Anatomy, arguments: dict[str, Any]) -> Call:
    """The `Call` with these arguments of a model's forward."""
    config = model.config
    last = arguments.pop("logits_to_keep", 0)
    names = {name: anatomy.named(name) for name in _OF_DECODER}
    supported = {*names.values(), *_OTHERS}
    if anatomy.source is not None:
        supported |= {"encoder_outputs", "attention_mask"}
    if strange := [name for name in arguments if name not in supported]:
        raise InputError(f"{strange[0]} is passed, which is not supported")
    ids, mask = arguments.get(names["input_ids"]), arguments.get(names["attention_mask"])
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.dtype != torch.long or not ids.numel():
        raise InputError(f"{names['input_ids']} is missing or does not have two dimensions")
    if not isinstance(last, int):
        raise InputError("logits_to_keep is a tensor of positions, which is not supported")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        raise InputError(f"its {names['attention_mask']} does not have two dimensions")
    cache = arguments.get("past_key_values")
    if cache is None:
        if not arguments.get("use_cache", getattr(config, "use_cache", False)):
            raise InputError("it uses no cache")
        cache = new_cache(model)
    elif not arguments.get("use_cache", True):
        raise InputError("a cache is passed with use_cache=False")
    returns_dict = bool(arguments.get("return_dict", getattr(config, "return_dict", True)))
    call = (ids, mask, arguments.get(names["position_ids"]), cache, returns_dict, last)
    if anatomy.source is None:
        return Call(*call)
    encoded = _encoded(arguments.get("encoder_outputs"))
    source_mask = None if anatomy.source.fixed else arguments.get("attention_mask")
    states = encoded[0]
    if states.ndim != 3 or states.shape[0] != ids.shape[0] or states.dtype != anatomy.dtype:
        raise InputError(f"its encoder's states are {states.dtype} {tuple(states.shape)}")
    if source_mask is not None and tuple(source_mask.shape) != tuple(states.shape[:2]):
        raise InputError(
            f"its attention_mask is {tuple(source_mask.shape)}, and the states {tuple(states.shape[:2])}"
        )
    return Call(*call, encoded=encoded, source_mask=source_mask)


def _encoded(outputs: Any) -> tuple[Any, ...]:
    """States, hidden states and attentions of an encoder; the last two are None unless requested."""
    if outputs is None:
        raise InputError("no encoder_outputs are passed")
    if isinstance(outputs, Mapping):
        parts = [outputs.get(name) for name in ("last_hidden_state", "hidden_states", "attentions")]
    elif isinstance(outputs, (tuple, list)):
        parts = [*outputs[:3], *([None] * (3 - len(outputs)))]
    else:
        raise InputError(f"its encoder_outputs are a {type(outputs).__name__}")
    if not isinstance(parts[0], torch.Tensor):
        raise InputError("its encoder_outputs have no states")
    return tuple(parts)

"""A decoder's `forward` that answers prompts and tokens by compiled programs, and all else as before."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from intarsia.errors import InputError, StaleWeightsError
from intarsia.generation.anatomy import Anatomy
from intarsia.generation.masks import attention_mask
from intarsia.generation.storage import StoredLayer, stored
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled
from intarsia.tuning.placed import PlacedForward

_TAKEN = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict")
_IF_FALSE = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True)
class Programs:
    """Compiled for one number of rows: a prompt without and with padding, and a token."""

    prompt: Compiled | PartlyCompiled | None
    masked_prompt: Compiled | PartlyCompiled | None
    token: Compiled | PartlyCompiled


@dataclass(frozen=True)
class _Call:
    ids: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    cache: Cache
    returns_dict: bool


class GeneratingForward(PlacedForward):
    """The `forward` of a decoder: compiled programs for prompts and single tokens, else the model's own.

    Both work on the same cache, which is a `DynamicCache` of transformers with layers in memory of a fixed
    length; so a call that no program was compiled for may come at any time.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, programs: Mapping[int, Programs], max_length: int
    ) -> None:
        super().__init__(type(model).__name__, model, ())
        self.anatomy, self.by_rows, self.max_length = anatomy, dict(programs), max_length
        self.__signature__ = inspect.signature(self.own)  # `generate` asks what forward takes
        self.__name__ = "forward"
        self.runs = {"prompt": 0, "token": 0, "own": 0}
        self._like = {rows: anatomy.empty(rows) for rows in programs}
        self._told: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        told: str | None = None
        if self.enabled and not self.module.training and not torch.is_grad_enabled() and not _autocast():
            try:
                if self._replaced():
                    raise StaleWeightsError(f"a weight of {self.path} was replaced")
                call = self._understood(args, kwargs)
                made = call if isinstance(call, str) else self._answer(call)
                if not isinstance(made, str):
                    return made
                told = made
            except StaleWeightsError as error:
                self.enabled, told = False, str(error)
            except InputError as error:  # nothing was written to the cache yet
                told = str(error)
        self.runs["own"] += 1
        kind = re.sub(r"\d+", "", told or "")  # one warning of a kind, not one for each token
        if told is not None and kind not in self._told:
            self.refused = told
            self._told.add(kind)
            warnings.warn(f"{self.path} runs in PyTorch for this call: {told}", stacklevel=2)
        return self.own(*args, **kwargs)

    def _understood(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | str:
        """The call in plain words; or why no program was compiled for it."""
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)  # the model's own forward raises it
        given = dict(bound.arguments)
        for name, parameter in self.__signature__.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        given = {name: value for name, value in given.items() if value is not None}
        config: Any = self.module.config
        for name in _IF_FALSE:
            if given.pop(name, getattr(config, name, False)):
                return f"{name} is asked for"
        kept = given.pop("logits_to_keep", 0)
        if strange := [name for name in given if name not in _TAKEN]:
            return f"it is given {strange[0]}"
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.dtype != torch.long or not ids.numel():
            return "it is given no input_ids of two dimensions"
        if not (self.anatomy.keeps and isinstance(kept, int) and kept == 1) and ids.shape[1] != 1:
            return "logits of the whole prompt are asked for"
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            return "its attention_mask has not two dimensions"
        cache = given.get("past_key_values")
        if cache is None:
            if not given.get("use_cache", getattr(config, "use_cache", False)):
                return "it uses no cache"
            cache = DynamicCache(config=config.get_text_config(decoder=True))
        elif not given.get("use_cache", True):
            return "it is given a cache and use_cache=False"
        returns_dict = bool(given.get("return_dict", getattr(config, "return_dict", True)))
        return _Call(ids, mask, given.get("position_ids"), cache, returns_dict)

    def _answer(self, call: _Call) -> Any:
        """What the model returns, from a program; or why none was compiled for the call."""
        rows, new = call.ids.shape
        programs = self.by_rows.get(rows)
        if programs is None:
            return f"it has {rows} rows, and compiled for are {', '.join(map(str, self.by_rows))}"
        if call.ids.device != self.anatomy.device:
            return f"input_ids are on {call.ids.device}, and the model on {self.anatomy.device}"
        past = int(call.cache.get_seq_length())
        if past + new > self.max_length:
            return f"it reaches token {past + new}, and max_length is {self.max_length}"
        if past and new > 1:
            return f"it has {new} new tokens after {past} in the cache"
        seen = call.mask
        if seen is not None:
            if seen.shape != (rows, past + new):
                return f"its attention_mask is {tuple(seen.shape)}, and the tokens {(rows, past + new)}"
            seen = seen != 0
            if bool(seen.all()):
                seen = None
            elif not bool(seen[:, -1].all()):
                return "its last token is padding"
        positions = call.positions
        if positions is None:
            positions = torch.arange(past, past + new, device=call.ids.device).expand(rows, new)
        elif positions.shape not in ((rows, new), (1, new)) or positions.dtype != torch.long:
            return f"its position_ids are {positions.dtype} {tuple(positions.shape)}"
        feed = [call.ids.contiguous(), positions.expand(rows, new).contiguous()]
        if new == 1:
            program: Compiled | PartlyCompiled | None = programs.token
        else:
            program = (
                programs.prompt if seen is None and programs.prompt is not None else programs.masked_prompt
            )
        if program is None:
            return "it has padding, and compiled for is none (padding=True)"
        layers = stored(call.cache, self.max_length, self._like[rows])
        if isinstance(layers, str):
            return layers
        if any(layer.room != self.max_length for layer in layers):
            return f"its cache was made for {layers[0].room} tokens, and compiled for are {self.max_length}"
        if program is not programs.prompt:
            feed += self._masks(seen, rows, past, new, None if new > 1 else self.max_length)
        if new == 1:
            feed += [store for layer in layers for store in (layer.key_store, layer.value_store)]
        self.runs["token" if new == 1 else "prompt"] += 1
        return self._finish(call, layers, program(*feed))

    def _masks(
        self, seen: torch.Tensor | None, rows: int, past: int, new: int, room: int | None
    ) -> list[torch.Tensor]:
        if seen is None:
            seen = torch.ones(rows, past + new, dtype=torch.bool, device=self.anatomy.device)
        return [
            attention_mask(seen, past=past, room=room, window=window, dtype=self.anatomy.mask_dtype)
            for _, window in self.anatomy.windows
        ]

    def _finish(self, call: _Call, layers: list[StoredLayer], results: Any) -> Any:
        """Write the new slices into the cache's memory; give the model's kind of result."""
        logits, *slices = results
        for layer, keys, values in zip(layers, slices[::2], slices[1::2], strict=True):
            layer.append(keys, values)
        made = self.anatomy.result(logits=logits, past_key_values=call.cache)
        return made if call.returns_dict else made.to_tuple()


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

"""Keys and values of a layer in memory of a fixed length, to which each token adds a slice."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


class StoredLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """A layer of a `DynamicCache` whose keys and values are the filled part of longer memory.

    To transformers it is a `DynamicLayer`: `keys` and `values` hold the tokens so far, and may be cropped,
    reordered or replaced. They are views of `key_store` and `value_store`, to which a token is appended
    without a copy of the others; what was replaced from outside is copied back in by `settle`. A layer with
    a sliding window keeps all tokens, since the mask hides them.
    """

    def __init__(self, key_store: torch.Tensor, value_store: torch.Tensor, is_sliding: bool = False) -> None:
        super().__init__()
        self.key_store, self.value_store = key_store, value_store
        self.is_sliding = is_sliding
        self.dtype, self.device = key_store.dtype, key_store.device
        self.is_initialized = True
        self._show(0)

    @property
    def room(self) -> int:
        """How many tokens the memory holds, filled or not."""
        return int(self.key_store.shape[-2])

    def settle(self) -> None:
        """Copy keys and values that were put in from outside (a reordering, say) into the memory."""
        if self.keys is None:  # after `reset`
            self.is_initialized = True
            self._show(0)
        if _is_start_of(self.keys, self.key_store) and _is_start_of(self.values, self.value_store):
            return
        keys, values, length = self.keys, self.values, self.keys.shape[-2]
        if not _fits(keys, self.key_store) or not _fits(values, self.value_store):
            self.key_store, self.value_store = _longer(keys, self.room), _longer(values, self.room)
        else:
            self.key_store[:, :, :length].copy_(keys)
            self.value_store[:, :, :length].copy_(values)
        self._show(length)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write further tokens behind the others; the memory grows where it is too short."""
        start = self.keys.shape[-2]
        end = start + keys.shape[-2]
        if end > self.room:
            self.key_store = _longer(self.keys, 2 * end)
            self.value_store = _longer(self.values, 2 * end)
        self.key_store[:, :, start:end].copy_(keys)
        self.value_store[:, :, start:end].copy_(values)
        self._show(end)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, give all: what the model's own forward asks of a layer."""
        if self.keys is None and key_states.shape[0] != self.key_store.shape[0]:
            self.key_store = _longer(key_states[:, :, :0], self.room)
            self.value_store = _longer(value_states[:, :, :0], self.room)
        self.settle()
        self.append(key_states, value_states)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self.keys, self.values = self.key_store[:, :, :length], self.value_store[:, :, :length]


def stored(cache: Cache, room: int, like: list[tuple[torch.Tensor, torch.Tensor]]) -> list[StoredLayer] | str:
    """The layers of a cache, made to stand in memory for `room` tokens; why that cannot be, if it cannot.

    `like` has keys and values of each layer for one call, from which shapes and dtypes are taken.
    """
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return f"the cache is a {type(cache).__name__}, and compiled for is a DynamicCache"
    layers = cache.layers
    # A cache is made with as many layers as the configuration names first, which may be the encoder's.
    if (layers and len(layers) < len(like)) or any(layer.is_initialized for layer in layers[len(like) :]):
        return f"the cache has {len(layers)} layers, and the model {len(like)}"
    made: list[StoredLayer] = []
    for place, (keys, values) in enumerate(like):
        layer = layers[place] if layers else None
        if not isinstance(layer, StoredLayer):
            told = _stored_layer(layer, keys, values, room)
            if isinstance(told, str):
                return told
            layer = told
        layer.settle()
        if layer.key_store.shape[0] != keys.shape[0]:
            if layer.keys.shape[-2]:
                return f"the cache has {layer.key_store.shape[0]} rows, and the call {keys.shape[0]}"
            layer = StoredLayer(
                _longer(keys[:, :, :0], room), _longer(values[:, :, :0], room), layer.is_sliding
            )
        made.append(layer)
    lengths = {layer.keys.shape[-2] for layer in made}
    if len(lengths) != 1:
        return f"the layers of the cache hold different numbers of tokens, {sorted(lengths)}"
    cache.layers = [*made, *layers[len(like) :]]
    return made


def _stored_layer(layer: Any, keys: torch.Tensor, values: torch.Tensor, room: int) -> StoredLayer | str:
    kinds = (type(None), DynamicLayer, DynamicSlidingWindowLayer)
    if type(layer) not in kinds:
        return f"the cache has a {type(layer).__name__}"
    slides = bool(getattr(layer, "is_sliding", False))
    made = StoredLayer(_longer(keys[:, :, :0], room), _longer(values[:, :, :0], room), slides)
    if layer is not None and layer.get_seq_length() > 0:
        if layer.get_seq_length() != layer.keys.shape[-2]:
            return "the cache has dropped tokens that left a sliding window"
        made.keys, made.values = layer.keys, layer.values
        made.settle()
    return made


def _longer(filled: torch.Tensor, room: int) -> torch.Tensor:
    """Zeros for so many tokens, the first of them filled: what is masked must be finite all the same."""
    rows, heads, length, size = filled.shape
    store = filled.new_zeros(rows, heads, max(room, length), size)
    store[:, :, :length].copy_(filled)
    return store


def _fits(part: torch.Tensor, store: torch.Tensor) -> bool:
    same = part.dtype == store.dtype and part.device == store.device
    return same and part.shape[:2] == store.shape[:2] and part.shape[-2] <= store.shape[-2]


def _is_start_of(part: torch.Tensor, store: torch.Tensor) -> bool:
    """Whether a tensor is the first tokens of the store, in its very memory."""
    at = part.data_ptr() == store.data_ptr() or part.numel() == 0
    return at and _fits(part, store) and part.stride() == store.stride()

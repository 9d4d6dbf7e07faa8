"""Keys and values of a layer in memory of a fixed length; each token adds a slice.

Tokens are written in place, since `generate` reads no keys. After other code has read keys or values, the
layer moves to new memory before the next token, as transformers' own cache does for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from intarsia.engines.guards.inputs import forget, stacked, tell_zeros, write
from intarsia.errors import InputError


class StoredLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """A layer of a `DynamicCache` whose keys and values are the filled part of a longer memory.

    transformers uses it as a `DynamicLayer`: `keys` and `values` are the tokens so far, and may be cropped,
    reordered or replaced. They are views of `key_store` and `value_store`, to which a token is appended
    without copying the others; `settle` copies keys and values that were replaced back into them. Code that
    has read keys or values may write to them, so the layer then moves to new memory before the next write. A
    layer with a sliding window keeps all tokens, since the mask hides them.
    """

    def __init__(self, key_store: torch.Tensor, value_store: torch.Tensor, is_sliding: bool = False) -> None:
        self._tokens: list[Any] | None = None  # views of the filled part, or what replaces them
        self._replaced = False
        self._length = 0
        self._is_shared = False  # other code has read keys or values
        super().__init__()
        self.key_store: torch.Tensor = key_store
        self.value_store: torch.Tensor = value_store
        # The memory of all layers, if this layer's is part of it, and the layer's number.
        self.stack: tuple[torch.Tensor | None, int] = None, 0
        self.is_sliding = is_sliding
        self.dtype: torch.dtype = key_store.dtype
        self.device: torch.device = key_store.device
        self.is_initialized = True
        self.show(0)

    @property
    def keys(self) -> Any:
        """The keys so far; None after `reset`."""
        return self._hand_out(0)

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._replace(0, keys)

    @property
    def values(self) -> Any:
        """The values so far; None after `reset`."""
        return self._hand_out(1)

    @values.setter
    def values(self, values: Any) -> None:
        self._replace(1, values)

    @property
    def length(self) -> int:
        """The number of tokens in the memory, after `settle`."""
        return self._length

    def get_seq_length(self) -> int:
        """The number of tokens, including those that were assigned."""
        if not self._replaced:
            return self._length
        keys = self._views()[0]
        return int(keys.shape[-2]) if keys is not None and keys.numel() else 0

    @property
    def room(self) -> int:
        """The number of tokens that the memory can hold."""
        return int(self.key_store.shape[-2])

    def settle(self) -> None:
        """Copy keys and values that were assigned, such as by a reordering, into the memory."""
        if not self._replaced:
            return
        keys, values = self._views()
        if keys is None:  # after `reset`
            self.is_initialized = True
            self._shorten(0)
            return
        length = keys.shape[-2]
        if _is_start_of(keys, self.key_store) and _is_start_of(values, self.value_store):
            self._shorten(length)
            return
        if self._is_shared or not _fits(keys, self.key_store) or not _fits(values, self.value_store):
            self.move(_longer(keys, self.room), _longer(values, self.room))
        else:
            self.key_store[:, :, :length].copy_(keys)
            self.value_store[:, :, :length].copy_(values)
        self._shorten(length)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write more tokens after the others. The memory grows if it is too short."""
        start, end = self.length, self.length + keys.shape[-2]
        if end > self.room:
            self.move(*(_longer(part, 2 * end) for part in self._views()))
        elif self._is_shared or not _may_be_written(self.key_store):
            self.move(self.key_store.clone(), self.value_store.clone())
        place = (slice(None), slice(None), slice(start, end))
        write(self.key_store, place, keys)
        write(self.value_store, place, values)
        self.show(end)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens and return all of them, for the model's own forward."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            # Gradients flow through a copy, since the memory is written in place.
            pairs = zip(self._views(), (key_states, value_states), strict=True)
            joined = [new if old is None else torch.cat([old, new], dim=-2) for old, new in pairs]
            self.keys, self.values = joined
            self.is_initialized = True
            return joined[0], joined[1]
        if self._views()[0] is None and key_states.shape[0] != self.key_store.shape[0]:
            self.is_initialized = True  # after `reset`, for another number of rows
            self.show(0)
            self.move(_longer(key_states[:, :, :0], self.room), _longer(value_states[:, :, :0], self.room))
        self.settle()
        self.append(key_states, value_states)
        keys, values = self._views()
        return keys, values

    def move(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use other memory."""
        self.key_store = keys
        self.value_store = values
        self.stack = (None, 0)
        self._is_shared = False
        self.show(self._length)

    @property
    def is_shared(self) -> bool:
        """Whether other code has read keys or values, which it may still use."""
        return self._is_shared

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens."""
        self._quietly(super().crop, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select rows, for beam search."""
        self._quietly(super().reorder_cache, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._quietly(super().batch_repeat_interleave, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select rows."""
        self._quietly(super().batch_select_indices, indices)

    def move_into(self, stack: torch.Tensor, place: int) -> None:
        """Use a part of a stack as memory, in which the values of a layer follow its keys."""
        self.move(stack[2 * place], stack[2 * place + 1])
        self.stack = stack, place

    def show(self, length: int) -> None:
        """Set the number of tokens."""
        self._length, self._tokens, self._replaced = length, None, False

    def _shorten(self, length: int) -> None:
        """Set a smaller number of tokens; values after them become zero unless they are finite."""
        if length < self._length and not self._is_finite(length):
            if self._is_shared:
                self.move(self.key_store.clone(), self.value_store.clone())
            for store in (self.key_store, self.value_store):
                store[:, :, length : self._length].zero_()
        self.show(length)

    def _is_finite(self, start: int) -> bool:
        dropped = [store[:, :, start : self._length] for store in (self.key_store, self.value_store)]
        return all(bool(part.isfinite().all()) for part in dropped)

    def _hand_out(self, place: int) -> Any:
        """Keys or values for other code, which may keep them and write to them."""
        forget((self.key_store, self.value_store)[place])
        self._is_shared = True
        return self._views()[place]

    def _quietly(self, method: Callable[[Any], None], *args: Any) -> None:
        """Run a method of transformers, which reads keys and values and keeps neither."""
        shared = self._is_shared
        method(*args)
        self._is_shared = shared

    def __getstate__(self) -> dict[str, Any]:
        """The state without its views, which pickle as tensors with memory of their own."""
        state = self.__dict__ | {"stack": (None, 0)}
        if self.stack[0] is not None:  # the whole stack would be pickled with a part of it
            state |= {"key_store": self.key_store.clone(), "value_store": self.value_store.clone()}
        return state if self._replaced else state | {"_tokens": None}

    def _views(self) -> list[Any]:
        if self._tokens is None:
            stores = (self.key_store, self.value_store)
            self._tokens = [store[:, :, : self._length] for store in stores]
        return self._tokens

    def _replace(self, place: int, value: Any) -> None:
        if "key_store" not in self.__dict__:  # transformers' own __init__ sets both to None
            return
        self._views()[place] = value
        self._replaced = True


def stored(cache: Cache, room: int, like: list[tuple[torch.Tensor, torch.Tensor]]) -> list[StoredLayer]:
    """The layers of a cache, with memory for `room` tokens; InputError for a cache of another kind.

    `like` has keys and values of each layer, from which shapes and dtypes are taken.
    """
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        raise InputError(f"the cache is a {type(cache).__name__}; compiled for a DynamicCache")
    layers = cache.layers
    # A new cache has as many layers as the configuration first names, which may be the encoder's number.
    if (layers and len(layers) < len(like)) or any(layer.is_initialized for layer in layers[len(like) :]):
        raise InputError(f"the cache has {len(layers)} layers, and the model {len(like)}")
    stored_layers: list[StoredLayer] = []
    for place, (keys, values) in enumerate(like):
        layer = layers[place] if layers else None
        if not isinstance(layer, StoredLayer):
            layer = _stored_layer(layer, keys, values, room)
        layer.settle()
        if layer.key_store.shape[0] != keys.shape[0]:
            if layer.length:
                raise InputError(
                    f"the cache has {layer.key_store.shape[0]} rows, and the call {keys.shape[0]}"
                )
            layer = StoredLayer(
                _longer(keys[:, :, :0], room), _longer(values[:, :, :0], room), layer.is_sliding
            )
        stored_layers.append(layer)
    lengths = {layer.length for layer in stored_layers}
    if len(lengths) != 1:
        raise InputError(f"the layers of the cache hold different numbers of tokens, {sorted(lengths)}")
    cache.layers = [*stored_layers, *layers[len(like) :]]
    return stored_layers


def stack_of(layers: list[StoredLayer]) -> torch.Tensor:
    """The memory of all layers as one tensor, keys and values in turn; layers are moved there if needed."""
    stack, _ = layers[0].stack
    if stack is None or not _are_in(stack, layers):
        stack = stacked([store for layer in layers for store in (layer.key_store, layer.value_store)])
        for place, layer in enumerate(layers):
            layer.move_into(stack, place)
    return stack


def _are_in(stack: torch.Tensor, layers: list[StoredLayer]) -> bool:
    """Whether the memory of the layers is this stack, in their order, and may be written to."""
    if not _may_be_written(stack):
        return False
    return all(layer.stack[0] is stack and layer.stack[1] == place for place, layer in enumerate(layers))


def append_to(layers: list[StoredLayer], slices: torch.Tensor) -> None:
    """Write a token of every layer after the others, by one copy; `slices` is stacked as the memory is."""
    start = layers[0].length
    if any(layer.is_shared for layer in layers):
        layers[0].stack = None, 0  # other code may use a part of the stack, so all move to a new one
    stack = stack_of(layers)
    end = start + slices.shape[-2]
    write(stack, (..., slice(start, end), slice(None)), slices)
    for layer in layers:
        layer.show(end)


def _stored_layer(layer: Any, keys: torch.Tensor, values: torch.Tensor, room: int) -> StoredLayer:
    kinds = (type(None), DynamicLayer, DynamicSlidingWindowLayer)
    if type(layer) not in kinds:
        raise InputError(f"the cache has a {type(layer).__name__}")
    slides = bool(getattr(layer, "is_sliding", False))
    fresh = StoredLayer(_longer(keys[:, :, :0], room), _longer(values[:, :, :0], room), slides)
    if layer is not None and layer.get_seq_length() > 0:
        if layer.get_seq_length() != layer.keys.shape[-2]:
            raise InputError("the cache has dropped tokens that left a sliding window")
        fresh.keys, fresh.values = layer.keys, layer.values
        fresh.settle()
    return fresh


def _longer(filled: torch.Tensor, room: int) -> torch.Tensor:
    """Memory for `room` tokens that begins with `filled`; zero after it, as masked values must be finite."""
    rows, heads, length, size = filled.shape
    store = filled.new_zeros(rows, heads, max(room, length), size)
    tell_zeros(store)
    write(store, (slice(None), slice(None), slice(length)), filled)
    return store


def _may_be_written(store: torch.Tensor) -> bool:
    return not store.is_inference() or torch.is_inference_mode_enabled()


def _fits(part: torch.Tensor, store: torch.Tensor) -> bool:
    same = part.dtype == store.dtype and part.device == store.device
    return same and part.shape[:2] == store.shape[:2] and part.shape[-2] <= store.shape[-2]


def _is_start_of(part: torch.Tensor, store: torch.Tensor) -> bool:
    """Whether a tensor is the beginning of the store, in the same memory."""
    at = part.data_ptr() == store.data_ptr() or part.numel() == 0
    return at and _fits(part, store) and part.stride() == store.stride()

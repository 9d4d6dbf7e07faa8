"""Guards of inputs, checked before the engine runs; known facts about inputs that we alone write."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from intarsia.engines.guards.kinds import AnyGuard, ValueGuard

# Sums of squares that are known of tensors without a look at them, as long as nobody else writes there.
#
# A cache of keys and values grows by a token at a time. The writer of the token knows what the whole adds up
# to; else guards look at all of it again for every token.
#
# Looking at the whole cache took 2.5 of 93 ms a token (`bench/generate.py --engines openvino`).


# By one thread and by numpy: a pool that helped with this spins for milliseconds afterwards, on the cores
# that the engine wants. A product of so few elements is not shared out by any BLAS.
_PIECE = 8192
# Of a bound on squares, what such sums may reach: each is rounded some thousand times in single precision.
REACH = 1 - 2**-10
_DTYPES = (torch.float16, torch.float32, torch.float64)


class _Record(NamedTuple):
    of: weakref.ref[torch.Tensor]
    version: int  # the count of writes when it was recorded
    squares: float


# By the identity of tensors. torch has a dictionary for it, which takes ten times as long to find one, and a
# token looks for two in every layer.
_records: dict[int, _Record] = {}


def squares_of(array: np.ndarray[Any, Any]) -> float:
    """The sum of the squares of an array; not finite if an element is not."""
    wide = array.astype(np.float32) if array.dtype == np.float16 else array  # squares do not overflow there
    flat = wide.reshape(-1)
    if flat.size <= _PIECE:
        return float(np.vdot(flat, flat))
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return sum(float(np.vdot(piece, piece)) for piece in pieces)


def tell_zeros(tensor: torch.Tensor) -> None:
    """Record that a tensor holds only zeros."""
    if _is_countable(tensor):
        _record(tensor, 0.0)


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts as one tensor, with the known facts about each part."""
    stack = torch.stack([*parts])
    squares = [known_squares(part) for part in parts]
    if _is_countable(stack) and None not in squares:
        _record(stack, sum(number for number in squares if number is not None))
    return stack


def _is_countable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _DTYPES and not tensor.is_inference()


def write(tensor: torch.Tensor, place: tuple[Any, ...], values: torch.Tensor) -> None:
    """Write values to a place of a tensor; what it adds up to stays known, as the most it may be.

    >>> memory = torch.zeros(4)
    >>> tell_zeros(memory)
    >>> write(memory, (slice(1, 3),), torch.tensor([3.0, 4.0]))
    >>> known_squares(memory), memory.tolist()
    (25.0, [0.0, 3.0, 4.0, 0.0])
    >>> known_squares(memory.mul_(2))
    """
    record = _known(tensor)
    part = tensor[place]
    if record is None:
        part.copy_(values)
        return
    whole = record.of()
    assert whole is not None  # it is the tensor, or what the tensor is a part of
    if _is_alike(values, part):  # it is contiguous, unlike a part of a longer memory
        added = squares_of(values.detach().numpy())
        part.copy_(values)
    else:
        part.copy_(values)
        added = squares_of(part.detach().numpy())
    _record(whole, record.squares + added)


def _is_alike(values: torch.Tensor, part: torch.Tensor) -> bool:
    if values.dtype != part.dtype or values.device != part.device or values.shape != part.shape:
        return False
    return not values.is_neg()


def forget(tensor: torch.Tensor) -> None:
    """Forget all facts about a tensor: other code has it and may write to it unnoticed."""
    _records.pop(id(tensor), None)
    if tensor._base is not None:
        _records.pop(id(tensor._base), None)


def known_squares(tensor: torch.Tensor) -> float | None:
    """The most that the squares of a tensor add up to; None where it is not known."""
    record = _known(tensor)
    return None if record is None else record.squares


def _known(tensor: torch.Tensor) -> _Record | None:
    """The record of a tensor, or of the tensor that it is a view of: their writes are counted together."""
    record = _records.get(id(tensor))
    if record is None:
        base = tensor._base
        if base is None or (record := _records.get(id(base))) is None or record.of() is not base:
            return None
    elif record.of() is not tensor:
        return None
    return record if record.version == tensor._version else None


def _record(tensor: torch.Tensor, squares: float) -> None:
    key, record = id(tensor), _records.get(id(tensor))
    of = record.of if record is not None and record.of() is tensor else weakref.ref(tensor, _forgetting(key))
    _records[key] = _Record(of, tensor._version, squares)


def _forgetting(key: int) -> Callable[[weakref.ref[torch.Tensor]], None]:
    """A function that removes the entry when its tensor is freed, unless another one has its address."""

    def forget_dead(dead: weakref.ref[torch.Tensor]) -> None:
        record = _records.get(key)
        if record is not None and record.of is dead:
            _records.pop(key, None)

    return forget_dead


def is_known_to_hold(guard: ValueGuard, tensor: Any) -> bool:
    """Whether the known facts imply a guard of the sum of an input's magnitudes."""
    if not guard.total or guard.low >= 0 or not isinstance(tensor, torch.Tensor) or tensor.is_inference():
        return False
    squares = known_squares(tensor)
    return squares is not None and squares <= REACH * guard.high * guard.high


# Guards of inputs, looked at before the engine runs.
#
# One thread looks, in numpy. `torch.dot` over an image is sooner done by two threads, of which one then spins
# for milliseconds on the core that the engine needs: ResNet-50 ran at 0.88 of the speed of its best peer, and
# at 0.99 since.


Array = np.ndarray[Any, Any]


def input_check(guard: ValueGuard) -> Callable[[Array], bool]:
    """Whether an input meets its guards; checked before the engine runs, at every call."""
    low, high, limit = guard.low, guard.high, REACH * guard.high * guard.high

    def small_squares(array: Array) -> bool:
        return squares_of(array) <= limit

    def total(array: Array) -> bool:
        return float(np.abs(array.astype(np.float64)).sum()) <= high

    def within(array: Array) -> bool:
        array = _wide(array)
        return not array.size or bool(low <= array.min() and array.max() <= high)

    if not guard.total:
        return within
    return small_squares if guard.low < 0 else total  # floats of any sign, or numbers that are added up


def _wide(array: Array) -> Array:
    """Half floats in single precision: numpy is fast there."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def sentence_about(broken: Sequence[AnyGuard], names: Sequence[str], tensors: Sequence[Any]) -> str:
    """The guard that does not hold, as a sentence with the values of inputs."""
    clauses = []
    for guard in broken[:3]:
        name = guard.tensors[0]
        clauses.append(f"{guard}{_values(tensors[names.index(name)]) if name in names else ''}")
    return ", and ".join(clauses)


def _values(source: Any) -> str:
    if not isinstance(source, torch.Tensor) or not source.numel():
        return f"; it is {source}"
    low, high = torch.aminmax(source)
    said = f"{low:g} to {high:g}" if source.is_floating_point() else f"{int(low)} to {int(high)}"
    return f"; it holds {said}"

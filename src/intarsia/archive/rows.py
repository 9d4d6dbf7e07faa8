"""Tensors that are rows of others: joined projections hold what they were joined from.

OpenVINO's joined projections stood beside the weights that they were joined from: a fifth of BERT's file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_SMALLEST = 1 << 16  # bytes that are worth looking for
_BEGINNING = 64  # bytes of a row, by which it is looked up before it is compared
_TRIES = 16  # comparisons of one tensor: rows of zeros begin alike


def rows_of_others(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """Of which tensor, and from which row on, others are a part; none of these is a part itself.

    >>> a, b = torch.rand(200, 256), torch.rand(100, 256)
    >>> rows_of_others({"a": a, "b": b, "joined": torch.cat([a, b])})
    {'a': ('joined', 0), 'b': ('joined', 200)}
    """
    alike: dict[Any, list[str]] = defaultdict(list)
    for key, tensor in tensors.items():
        if tensor.dim() > 1 and tensor.nbytes >= _SMALLEST and tensor.is_contiguous() and _is_plain(tensor):
            alike[tensor.dtype, tensor.shape[1:]].append(key)
    places: dict[str, tuple[str, int]] = {}
    for keys in alike.values():
        if len({len(tensors[key]) for key in keys}) > 1:
            places |= _among({key: tensors[key] for key in keys})
    return {key: places[key] for key in tensors if key in places}


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_complex()


def _among(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """The same for tensors whose rows are of one shape and dtype."""
    begins: dict[bytes, list[str]] = defaultdict(list)
    for key, tensor in tensors.items():
        begins[next(iter(_beginnings(tensor[:1])))].append(key)
    places: dict[str, tuple[str, int]] = {}
    tried = Counter[str]()
    for whole in sorted(tensors, key=lambda key: -len(tensors[key])):
        if whole in places:
            continue
        for row, beginning in enumerate(_beginnings(tensors[whole])):
            for key in begins.get(beginning, ()):
                if key in places or tried[key] == _TRIES or not _has_room(tensors[key], tensors[whole], row):
                    continue
                tried[key] += 1
                if _is_there(tensors[key], tensors[whole], row):
                    places[key] = whole, row
    return places


def _beginnings(tensor: torch.Tensor) -> Iterable[bytes]:
    table = tensor.reshape(len(tensor), -1).view(torch.uint8)[:, :_BEGINNING]
    return map(bytes, table.numpy())


def _has_room(part: torch.Tensor, whole: torch.Tensor, row: int) -> bool:
    return len(part) < len(whole) and row + len(part) <= len(whole)


def _is_there(part: torch.Tensor, whole: torch.Tensor, row: int) -> bool:
    rows = whole[row : row + len(part)]
    # By bytes: -0.0 is not 0.0, and NaN is itself.
    return torch.equal(part.reshape(-1).view(torch.uint8), rows.reshape(-1).view(torch.uint8))

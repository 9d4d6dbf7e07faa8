"""Weights in safetensors files: one file, or the shards of a folder, read tensor by tensor.

A tensor is read into memory of its own: pages of a mapped file count as the process's until the last view of
it goes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from intarsia.archive.tensors import DTYPES, MOST_HEADER
from intarsia.errors import InputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int

    def read(self) -> torch.Tensor:
        """The tensor in memory of its own: the file is read, not mapped, so nothing else of it is held."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if not self.bytes:
            return tensor
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            flat: Any = tensor.view(-1).view(torch.uint8).numpy()
            into = memoryview(flat)
            done = 0
            while done < self.bytes:  # one read gives at most 2 GB
                count = file.readinto(into[done:])
                if not count:
                    raise InputError(f"{self.file} ended while it was read")
                done += count
        return tensor

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def open_shards(path: str | Path) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file, or of a folder, by name; only headers are read.

    A folder has `model.safetensors.index.json`, which names its shards, or one file, `model.safetensors`.
    """
    place = Path(path)
    if place.is_file():
        return dict(_entries(place))
    if (place / INDEX).is_file():
        return _indexed(place)
    if (place / SINGLE).is_file():
        return dict(_entries(place / SINGLE))
    raise InputError(f"{path} is neither a safetensors file nor a folder with {INDEX} or {SINGLE}")


def _indexed(folder: Path) -> Mapping[str, StoredTensor]:
    try:
        weight_map: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / INDEX} has no weight_map: {error}") from error
    for name in files:
        if Path(name).name != name or not (folder / name).is_file():
            raise InputError(f"{folder / INDEX} names {name}, which is not in the folder")
    found = {(file, name): entry for file in files for name, entry in _entries(folder / file)}
    told = {(file, name) for name, file in weight_map.items()}
    for file, name in sorted(told ^ found.keys()):
        lacks = INDEX if (file, name) in found else file
        raise InputError(f"{folder / lacks} lacks {name}, which {INDEX if lacks == file else file} has")
    return {name: entry for (_, name), entry in found.items()}


def _entries(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(MOST_HEADER, size - 8):
            raise InputError(f"{file} is not a safetensors file, or is cut off")
        text = stream.read(length)
    try:
        header: Mapping[str, Any] = json.loads(text)
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, _entry(file, entry, 8 + length, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} is not a safetensors file: its header cannot be read ({error!r})"
        ) from error


def _entry(file: Path, entry: Mapping[str, Any], base: int, size: int) -> StoredTensor:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= size - base or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{entry} does not lie in the file")
    return StoredTensor(file, dtype, shape, base + start, end - start)

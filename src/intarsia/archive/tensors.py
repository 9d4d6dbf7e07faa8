"""The table of tensors, which all segments and engines share, as safetensors.

This file writes and reads the format itself. The library (0.8) handles whole files only: `safe_open` takes a
path, while the table is a member of an archive, and `serialize` and `deserialize` copy all of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from intarsia.archive.codec import Devices
from intarsia.archive.container import ALIGNMENT
from intarsia.errors import ArchiveError
from intarsia.plain_tensors import SAFETENSORS_DTYPES, is_opaque, is_traceable_subclass

WEIGHTS = "weights.safetensors"
MOST_HEADER = 100_000_000  # as in safetensors
_SMALLEST = 1 << 16  # bytes of a tensor that is searched for in others
_BEGINNING = 64  # bytes of a row, by which it is looked up before it is compared
_TRIES = 16  # comparisons for one tensor, since rows of zeros begin alike
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class TensorTable:
    """The tensors of a module, each under one key. Equal memory, or equal contents, is stored once."""

    def __init__(self) -> None:
        self._by_place: dict[Any, str] = {}
        self._by_contents: dict[Any, str] = {}
        self._by_bytes: dict[bytes, str] = {}
        self._alike: dict[str, str] = {}  # tensors that are the bytes of another in other shapes or dtypes
        self._tensors: dict[str, torch.Tensor] = {}
        self._alone: dict[Any, str] = {}  # keys of tensors that a call changes, by their storages

    def add(self, tensor: torch.Tensor, name: str, *, changing: bool = False) -> str:
        """The key of a tensor. A tensor that a call changes must not share memory with another one."""
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise ArchiveError(f"{name} is a tensor of layout {tensor.layout} without plain elements")
        if is_traceable_subclass(tensor) or is_opaque(tensor):
            raise ArchiveError(f"{name} is a {type(tensor).__name__}, a class that a file cannot hold")
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        where = (tensor.untyped_storage().data_ptr(), tensor.device) if tensor.numel() else None
        place = (where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if where is not None and place in self._by_place:
            return self._by_place[place]
        if where is not None and where in self._alone:
            raise ArchiveError(f"{name} shares its memory with {self._alone[where]}, which the model changes")
        key = self._new_key(name) if changing else self._key_of(tensor, name)
        self._by_place[place] = key
        self._tensors.setdefault(key, tensor)
        if changing and where is not None:
            self._alone[where] = key
        return key

    def _key_of(self, tensor: torch.Tensor, name: str) -> str:
        _, laid_out = _in_order(tensor)
        digest = hashlib.sha256(_bytes(laid_out)).digest()
        contents = (digest, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if contents in self._by_contents:
            return self._by_contents[contents]
        key = self._by_contents[contents] = self._new_key(name)
        is_named = tensor.dtype in _NAMES and _is_plain(tensor)
        if tensor.nbytes >= _SMALLEST and tensor.is_contiguous() and is_named:
            whole = self._by_bytes.setdefault(digest, key)
            if whole != key:
                self._alike[key] = whole
        return key

    def _new_key(self, name: str) -> str:
        key, count = name, 1
        while key in self._tensors:
            key, count = f"{name}.{count}", count + 1
        return key

    def description(self) -> dict[str, dict[str, Any]]:
        """The properties that safetensors does not store: order of dimensions, device, dtype, overlaps."""
        described: dict[str, dict[str, Any]] = {}
        for key, tensor in self._tensors.items():
            order, _ = _in_order(tensor)
            described[key] = {"order": order, "device": str(tensor.device), "complex": tensor.is_complex()}
        for key, (whole, row) in self._rows.items():
            described[key]["rows"] = [whole, row, row + len(self._tensors[key])]
        for key, whole in self._alike.items():
            tensor = self._tensors[key]
            described[key]["alike"] = [whole, _NAMES[tensor.dtype], list(tensor.shape)]
        return described

    @cached_property
    def _rows(self) -> dict[str, tuple[str, int]]:
        """The tensors that are rows of another one, computed when all have been added."""
        left_out = {*self._alone.values(), *self._alike}
        return _rows_of_others({key: t for key, t in self._tensors.items() if key not in left_out})

    def places(self) -> dict[str, int]:
        """The positions in the file of the tensors that are stored in row-major order."""
        stored, header, text = self._layout()
        plain = {
            key
            for key, t in self._tensors.items()
            if t.is_contiguous() and not t.is_complex() and t.device.type == "cpu"
        }
        starts = {key: len(text) + header[key]["data_offsets"][0] for key, _ in stored if key in plain}
        for key, (whole, row) in self._rows.items():
            starts[key] = starts[whole] + row * self._tensors[whole][0].nbytes
        for key, whole in self._alike.items():
            starts[key] = starts[whole]
        return starts

    def _layout(self) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any], bytes]:
        """The tensors as stored, the header that describes them, and its bytes."""
        elsewhere = self._rows.keys() | self._alike.keys()
        own = {key: tensor for key, tensor in self._tensors.items() if key not in elsewhere}
        stored = [(key, _real(_in_order(tensor)[1])) for key, tensor in own.items()]
        # The format has no gaps: with the largest elements first, all tensors are aligned.
        stored.sort(key=lambda item: -item[1].element_size())
        header: dict[str, Any] = {}
        at = 0
        for key, tensor in stored:
            if tensor.dtype not in _NAMES:
                raise ArchiveError(f"{key} holds {tensor.dtype}, for which safetensors has no name")
            end = at + tensor.nbytes
            header[key] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        return stored, header, struct.pack("<Q", len(text)) + text

    def chunks(self) -> Iterator[Any]:
        """The bytes of the safetensors file, in chunks."""
        stored, _, text = self._layout()
        yield text
        for _, tensor in stored:
            yield _bytes(tensor)


def _in_order(tensor: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The dimensions by decreasing stride, and the tensor, contiguous in that order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    laid_out = tensor.permute(order)
    if not laid_out.is_contiguous():  # it has gaps or overlaps itself, so its strides are not stored
        order, laid_out = list(range(tensor.dim())), tensor.contiguous()
    return order, laid_out


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes(tensor: torch.Tensor) -> Any:
    flat = _real(tensor).cpu().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def read_tensors(
    buffer: memoryview, described: Mapping[str, Mapping[str, Any]], devices: Devices
) -> dict[str, torch.Tensor]:
    """The tensors in the buffer's own memory; ArchiveError if one does not lie completely inside it."""
    length = struct.unpack_from("<Q", buffer)[0]
    if length > min(MOST_HEADER, len(buffer) - 8):
        raise ArchiveError(f"the header of {WEIGHTS} claims {length} bytes")
    header = json.loads(bytes(buffer[8 : 8 + length]))
    data = buffer[8 + length :]
    parts = {key: entry["rows"] for key, entry in described.items() if "rows" in entry}
    if set(header) != {key for key, entry in described.items() if not {"rows", "alike"} & entry.keys()}:
        raise ArchiveError(f"{WEIGHTS} does not hold the tensors of the manifest")
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in header.items():
        dtype, shape, (start, end) = SAFETENSORS_DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        size = math.prod(shape) * dtype.itemsize
        if any(dim < 0 for dim in shape) or not 0 <= start <= end <= len(data) or end - start != size:
            raise ArchiveError(f"{key} does not lie in {WEIGHTS} as its header says")
        tensors[key] = _placed(_read(data[start:end], dtype, shape), described[key], devices)
    for key, (whole, begin, stop) in parts.items():
        if whole in parts or not 0 <= begin < stop <= len(tensors[whole]):
            raise ArchiveError(f"{key} is not part of {whole} as the manifest says")
        tensors[key] = tensors[whole][begin:stop]
    return tensors | alike(tensors, described)


def alike(
    tensors: Mapping[str, torch.Tensor], described: Mapping[str, Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """The tensors that are the bytes of others, over the memory of those.

    Weights in few bits stand in the model in one shape and dtype, and in another in what engines read: they
    took two thirds of the file.
    """
    shared = {}
    views = {key: entry["alike"] for key, entry in described.items() if "alike" in entry}
    for key, (whole, dtype, shape) in views.items():
        stored, described_dtype = tensors[whole], SAFETENSORS_DTYPES[dtype]
        if min(shape, default=0) < 0 or stored.nbytes != math.prod(shape) * described_dtype.itemsize:
            raise ArchiveError(f"{key} does not consist of the bytes of {whole}")
        shared[key] = _read_again(stored, described_dtype, shape)
    return shared


def _read_again(tensor: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    return (octets if octets.data_ptr() % dtype.itemsize == 0 else octets.clone()).view(dtype).view(shape)


def _read(data: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if data.readonly:
        data = memoryview(bytearray(data))
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def _placed(tensor: torch.Tensor, description: Mapping[str, Any], devices: Devices) -> torch.Tensor:
    if description["complex"]:
        tensor = torch.view_as_complex(tensor)
    order = description["order"]
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(back).to(devices(torch.device(description["device"])))


def _rows_of_others(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """For tensors that are rows of another one: that tensor, and the first row. No row has rows of its own.

    Otherwise, the projections that OpenVINO joins would be stored twice, which was a fifth of BERT's file.

    >>> a, b = torch.rand(200, 256), torch.rand(100, 256)
    >>> _rows_of_others({"a": a, "b": b, "joined": torch.cat([a, b])})
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
    """The same, for tensors whose rows have one shape and dtype."""
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
    # Bytes are compared: -0.0 differs from 0.0, and NaN equals itself.
    return torch.equal(part.reshape(-1).view(torch.uint8), rows.reshape(-1).view(torch.uint8))

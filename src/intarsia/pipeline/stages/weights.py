"""Weights of stages from safetensors: one file, or the shards of a folder, read tensor by tensor.

Stages that were cut on the meta device get memory first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from intarsia.errors import InputError, near_names, some_of
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import form_text
from intarsia.pipeline.stages.stage import Stage
from intarsia.plain_tensors import SAFETENSORS_DTYPES as DTYPES

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its name, dtype and shape."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """The tensor, in its own memory."""
        # safetensors 0.8 maps a file, whose pages stay resident until the last view is deleted. So the file
        # is opened for each tensor, which is copied: a rank that loads 289 MB has at most one tensor of
        # mapped pages (31 MB) at a time.
        with safe_open(self.file, "pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
            return tensor.clone()

    def __str__(self) -> str:
        return form_text(self.dtype, self.shape)


def open_shards(path: str | Path) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file, or of a folder, by name. Only headers are read.

    A folder has either `model.safetensors.index.json`, which names its shards, or `model.safetensors`.
    """
    place = Path(path)
    if place.is_file():
        return _entries(place)
    if (place / INDEX).is_file():
        return _indexed(place)
    if (place / SINGLE).is_file():
        return _entries(place / SINGLE)
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
    entries = {(file, name): entry for file in files for name, entry in _entries(folder / file).items()}
    listed = {(file, name) for name, file in weight_map.items()}
    for file, name in sorted(listed ^ entries.keys()):
        lacks = INDEX if (file, name) in entries else file
        raise InputError(f"{folder / lacks} lacks {name}, which {INDEX if lacks == file else file} has")
    return {name: entry for (_, name), entry in entries.items()}


def _entries(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
            forms = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise InputError(f"{file} is not a safetensors file, or is incomplete: {error}") from error
    for name, (dtype, _) in forms.items():
        if dtype not in DTYPES:
            raise InputError(f"{name} in {file} has the dtype {dtype}, which is none of {', '.join(DTYPES)}")
    return {name: StoredTensor(file, name, DTYPES[dtype], shape) for name, (dtype, shape) in forms.items()}


@dataclass(frozen=True)
class Weights:
    """A source of weights: a safetensors file or a folder of shards, and how to map its names.

    `rename` is a function from a parameter's name in the model to its name in the file. `buffers` are values
    of buffers that are in no file. Names that are only in the file raise InputError if `strict` is True.
    """

    path: str | Path
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    rename: Callable[[str], str] | None = None
    strict: bool = True


@dataclass
class _Slot:
    """A tensor of the model: its names, whether the model saves it, and whether a stage reads it."""

    tensor: Tensor
    saved: bool = False
    read: bool = False
    names: dict[str, None] = field(default_factory=dict)
    stored: list[StoredTensor] = field(default_factory=list)
    value: Tensor | None = None

    @property
    def name(self) -> str:
        return next(iter(self.names))

    @property
    def form(self) -> str:
        return form_text(self.tensor.dtype, self.tensor.shape)


def load_stages(
    stages: StageSequence, weights: Weights, only: Collection[int] | None = None, device: Any = None
) -> None:
    """Fill the stages with numbers in `only` (by default, all) from `weights`.

    The names of the whole model are checked first; only the tensors of these stages are read. A tensor on the
    meta device gets memory on `device` (by default, the CPU); others are filled in place.
    """
    parts = list(stages)
    numbers = range(len(parts)) if only is None else sorted(only)
    if any(i not in range(len(parts)) for i in numbers):
        raise InputError(f"only={list(numbers)} names a stage that does not exist; there are {len(parts)}")
    slots = _slots(parts)
    _match(slots, weights, stages)
    _fill([parts[i] for i in numbers], slots, device)


def memory_for_stages(
    stages: StageSequence, buffers: Mapping[str, Tensor], only: Collection[int], device: Any
) -> None:
    """Allocate memory for these stages, to read a checkpoint into it; set buffers that no checkpoint has."""
    slots = _slots(list(stages))
    values = _buffer_values(stages, buffers)
    for slot in slots.values():
        if not slot.saved:
            _take_value(slot, values)
    _fill([stages[i] for i in only], slots, device)


def _fill(parts: Sequence[nn.Module], slots: Mapping[int, _Slot], device: Any) -> None:
    """Replace each tensor, under all its names, by a filled one, and move the stages to the device."""
    filled: dict[int, Tensor | None] = {}
    for part in parts:
        on_meta = any(t.is_meta for t in [*part.parameters(), *part.buffers()])
        place = device if device is not None else "cpu" if on_meta else None
        for module in part.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in list(held.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in filled:
                        filled[id(tensor)] = _filled(slots[id(tensor)], place)
                    value: Any = filled[id(tensor)]
                    if value is None:
                        del held[name]
                    else:
                        held[name] = value
        if place is not None:
            part.to_device(place) if isinstance(part, Stage) else part.to(place)


def _filled(slot: _Slot, place: Any) -> Tensor | None:
    """The tensor with its values; None for a buffer that is neither read nor saved."""
    old, new = slot.tensor, slot.value
    for stored in slot.stored:
        other = stored.read()
        if new is not None and not torch.equal(new, other):
            raise InputError(f"{' and '.join(slot.names)} are tied in the model, but differ in the file")
        new = other
    if not old.is_meta:
        with torch.no_grad():
            return old if new is None else old.copy_(new)
    if new is None and not slot.saved:
        return None
    new = torch.empty(old.shape, dtype=old.dtype, device=place) if new is None else new.to(place, old.dtype)
    if not isinstance(old, nn.Parameter):
        return new
    parameter = nn.Parameter(new, requires_grad=old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def _slots(parts: Sequence[nn.Module]) -> dict[int, _Slot]:
    slots: dict[int, _Slot] = {}
    for part in parts:
        saved = set(part.state_dict())
        form = getattr(part, "form", None)
        read = None if form is None else set(form.states.values())
        for name, tensor in [
            *part.named_parameters(remove_duplicate=False),
            *part.named_buffers(remove_duplicate=False),
        ]:
            slot = slots.setdefault(id(tensor), _Slot(tensor))
            slot.names[name] = None
            slot.saved |= name in saved
            slot.read |= read is None or name in read
    return slots


def _match(slots: Mapping[int, _Slot], weights: Weights, stages: StageSequence) -> None:
    """Find every tensor of the model in the files. Raises InputError with everything that does not fit."""
    shards = open_shards(weights.path)
    rename = weights.rename or (lambda name: name)
    values = _buffer_values(stages, weights.buffers)
    wrong, missing, expected = [], [], {rename(key) for key in stages.keys}
    for slot in slots.values():
        expected |= {rename(name) for name in slot.names}
        slot.stored = [shards[rename(n)] for n in slot.names if rename(n) in shards]
        wrong += [f"{slot.name} is {slot.form}, stored as {s}" for s in slot.stored if not _fits(slot, s)]
        if slot.stored:
            continue
        if slot.saved:
            missing.append(rename(slot.name))
        else:
            _take_value(slot, values)
    extra = [name for name in shards if name not in expected] if weights.strict else []
    text = misfit_text({"lacks": missing, "also has": extra, "does not fit:": wrong})
    if not text:
        return
    hint = near_names(missing[0], extra) if missing else ""
    if hint:
        hint += " Map the names with rename="
    raise InputError(f"{weights.path} {text}{hint}")


def misfit_text(problems: Mapping[str, Sequence[str]]) -> str:
    """What a file lacks, has besides, or has in another form, by labels; empty if it fits."""
    return "; it ".join(f"{label} {some_of(names, most=5)}" for label, names in problems.items() if names)


def _buffer_values(stages: StageSequence, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of buffers by name: the model's, and `buffers`. Raises InputError for unknown names."""
    names = {name for part in stages for name, _ in part.named_buffers(remove_duplicate=False)}
    for name in buffers:
        if name not in names:
            hint = near_names(name, names)
            raise InputError(f"buffers names {name!r}, which is not a buffer of the model{hint}")
    return {**stages.buffer_values, **buffers}


def _take_value(slot: _Slot, values: Mapping[str, Tensor]) -> None:
    """Set the value of a buffer that is in no file. Raises InputError if it has none and a stage reads it."""
    slot.value = next((values[n] for n in slot.names if n in values), None)
    if slot.value is not None and slot.value.shape != slot.tensor.shape:
        raise InputError(f"buffers has {slot.name} of shape {list(slot.value.shape)}; it is {slot.form}")
    if slot.value is None and slot.tensor.is_meta and slot.read:
        raise InputError(
            f"{slot.name} is a buffer that the model computes and does not save, and it is on the meta"
            f" device without values. Use buffers={{{slot.name!r}: ...}}, or compute it first"
        )


def _fits(slot: _Slot, stored: StoredTensor) -> bool:
    kinds = [(d.is_floating_point, d.is_complex) for d in (slot.tensor.dtype, stored.dtype)]
    return tuple(slot.tensor.shape) == stored.shape and kinds[0] == kinds[1]

"""Stages given their weights from safetensors: those that were cut on the meta device get memory first."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.errors import InputError
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.shards import StoredTensor, open_shards
from intarsia.pipeline.stages.stage import Stage

_SHOWN = 5  # names in an error


@dataclass(frozen=True)
class Weights:
    """Where weights come from: a safetensors file, or a folder of shards, and how its names are meant.

    `rename` gives the file's name of a parameter from the model's. `buffers` are values of buffers that no
    file holds. Names that only the file has are refused unless `strict` is False.
    """

    path: str | Path
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    rename: Callable[[str], str] | None = None
    strict: bool = True


@dataclass
class _Slot:
    """One tensor of the model: its names, whether the model saves it and whether a stage reads it."""

    tensor: Tensor
    saved: bool = False
    read: bool = False
    names: dict[str, None] = field(default_factory=dict)
    stored: list[StoredTensor] = field(default_factory=list)
    value: Tensor | None = None

    @property
    def name(self) -> str:
        return next(iter(self.names))


def load_stages(
    stages: StageSequence, weights: Weights, only: Collection[int] | None = None, device: Any = None
) -> None:
    """Fill the stages numbered `only` (all) from `weights`; the names of the whole model are checked first.

    A tensor on the meta device gets memory on `device` (the CPU); another is filled in place. Only the
    tensors of these stages are read.
    """
    parts = list(stages)
    wanted = range(len(parts)) if only is None else sorted(only)
    if any(i not in range(len(parts)) for i in wanted):
        raise InputError(f"only={list(wanted)} names a stage that does not exist; there are {len(parts)}")
    slots = _slots(parts)
    _match(slots, weights, stages)
    _fill([parts[i] for i in wanted], slots, device)


def memory_for_stages(
    stages: StageSequence, buffers: Mapping[str, Tensor], only: Collection[int], device: Any
) -> None:
    """Give these stages memory for a checkpoint to be read into; buffers that none holds get their values."""
    slots = _slots(list(stages))
    given = _buffer_values(stages, buffers)
    for slot in slots.values():
        if not slot.saved:
            _take_value(slot, given)
    _fill([stages[i] for i in only], slots, device)


def _fill(parts: Sequence[nn.Module], slots: Mapping[int, _Slot], device: Any) -> None:
    """Put a tensor with values in place of each, once for all the names it has, and the graph beside them."""
    made: dict[int, Tensor | None] = {}
    for part in parts:
        place = device if device is not None else "cpu" if _without_memory(part) else None
        for module in part.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in list(held.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = _filled(slots[id(tensor)], place)
                    value: Any = made[id(tensor)]
                    if value is None:
                        del held[name]
                    else:
                        held[name] = value
        if place is not None:
            part.to_device(place) if isinstance(part, Stage) else part.to(place)


def _without_memory(part: nn.Module) -> bool:
    return any(t.is_meta for t in [*part.parameters(), *part.buffers()])


def _filled(slot: _Slot, place: Any) -> Tensor | None:
    """The tensor with its values; None for a buffer that nothing reads and nothing saves."""
    old, new = slot.tensor, slot.value
    for stored in slot.stored:
        other = stored.read()
        if new is not None and not torch.equal(new, other):
            raise InputError(f"{' and '.join(slot.names)} are one tensor in the model; the file has two")
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
    """Find every tensor of the model in the files, or say in one error what does not fit."""
    shards = open_shards(weights.path)
    rename = weights.rename or (lambda name: name)
    given = _buffer_values(stages, weights.buffers)
    wrong, missing, known = [], [], {rename(key) for key in stages.keys}
    for slot in slots.values():
        known |= {rename(name) for name in slot.names}
        slot.stored = [shards[rename(n)] for n in slot.names if rename(n) in shards]
        wrong += [
            f"{slot.name} is {_form(slot.tensor)}, stored as {s}" for s in slot.stored if not _fits(slot, s)
        ]
        if slot.stored:
            continue
        if slot.saved:
            missing.append(rename(slot.name))
        else:
            _take_value(slot, given)
    extra = [name for name in shards if name not in known] if weights.strict else []
    problems = [
        f"{label} {_some(names)}"
        for label, names in (("lacks", missing), ("has besides", extra), ("does not fit:", wrong))
        if names
    ]
    if not problems:
        return
    near = difflib.get_close_matches(missing[0], extra, n=1) if missing and extra else []
    hint = f"; is {near[0]} meant by {missing[0]}? rename= says so" if near else ""
    raise InputError(f"{weights.path} {'; it '.join(problems)}{hint}")


def _buffer_values(stages: StageSequence, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of buffers that are known, or given by name; a name that is nowhere is an error."""
    held = {name for part in stages for name, _ in part.named_buffers(remove_duplicate=False)}
    for name in given:
        if name not in held:
            near = difflib.get_close_matches(name, held, n=1)
            told = f"; is {near[0]!r} meant?" if near else ""
            raise InputError(f"buffers gives {name!r}, which is not a buffer of the model{told}")
    return {**stages.buffer_values, **given}


def _take_value(slot: _Slot, given: Mapping[str, Tensor]) -> None:
    """The value of a buffer that no file holds: given, or already there; else it is refused by name."""
    slot.value = next((given[n] for n in slot.names if n in given), None)
    if slot.value is not None and slot.value.shape != slot.tensor.shape:
        raise InputError(
            f"buffers gives {slot.name} the shape {list(slot.value.shape)}; it is {_form(slot.tensor)}"
        )
    if slot.value is None and slot.tensor.is_meta and slot.read:
        raise InputError(
            f"{slot.name} is a buffer that the model computes and does not save, and it is on the meta"
            f" device: it has no values. Give buffers={{{slot.name!r}: ...}}, or compute it first"
        )


def _fits(slot: _Slot, stored: StoredTensor) -> bool:
    kinds = [(d.is_floating_point, d.is_complex) for d in (slot.tensor.dtype, stored.dtype)]
    return tuple(slot.tensor.shape) == stored.shape and kinds[0] == kinds[1]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

"""Checkpoints by torch.distributed.checkpoint under the plain model's names, that any cut can load."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from intarsia.errors import InputError
from intarsia.pipeline.distributed.optimizer_options import (
    Options,
    as_bytes,
    from_bytes,
    options_by_name,
    options_of_groups,
    set_options,
)
from intarsia.pipeline.distributed.placement import global_rank
from intarsia.pipeline.distributed.sharded import empty_like_parameter

_MODEL, _OPTIMIZER, _OPTIONS, _COUNTERS = "model/", "optimizer/", "options/", "counters/"


def save_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    counters: Mapping[str, int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's share of the model, and of an optimizer's state, into a folder all ranks write to.

    `counters` are numbers that are the same on all ranks.
    """
    flat = {_MODEL + key: value for key, value in state.items()}
    if dist.get_rank(group) == 0:
        flat |= {_COUNTERS + name: torch.tensor(number) for name, number in counters.items()}
    if optimizer is not None:
        for name, parameter in names.items():
            for slot, value in optimizer.state.get(parameter, {}).items():
                flat[f"{_OPTIMIZER}{name}/{slot}"] = (
                    value if isinstance(value, Tensor) else torch.tensor(value)
                )
        flat |= {_OPTIONS + n: as_bytes(told) for n, told in options_by_name(optimizer, names).items()}
    save(flat, checkpoint_id=str(path), process_group=group)


def load_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, int]:
    """Read this rank's share, whatever cut and number of ranks wrote it; tensors are filled in place.

    What one rank refuses no rank begins to read. Returns the counters that were saved.
    """
    flat: dict[str, Any] = {_MODEL + key: value for key, value in state.items()}
    slots: dict[str, tuple[str, str]] = {}
    options: list[Options] = []
    counters: list[str] = []
    refusal: Exception | None = None
    try:
        stored = _stored(path)
        counters = [key for key in stored if key.startswith(_COUNTERS)]
        flat |= {key: _empty(stored[key]) for key in counters}
        missing = [key for key in state if _MODEL + key not in stored]
        if missing:
            raise InputError(f"the checkpoint {path} lacks {', '.join(missing)}")
        if optimizer is not None:
            options = options_of_groups(optimizer, names, _told(path, stored, names))
            for key in stored:
                name, _, slot = key.removeprefix(_OPTIMIZER).rpartition("/")
                if key.startswith(_OPTIMIZER) and name in names:
                    slots[key] = (name, slot)
            for key, (name, _) in slots.items():
                meta = stored[key]
                flat[key] = empty_like_parameter(names[name], meta.size, meta.properties.dtype)
    except Exception as error:
        refusal = error
    _raise_together(refusal, group)
    load(flat, checkpoint_id=str(path), process_group=group)
    read = {key.removeprefix(_COUNTERS): int(flat[key]) for key in counters}
    if not read:
        warnings.warn(
            f"the checkpoint {path} holds no seed and no number of steps: dropout continues with"
            " those of this pipeline",
            stacklevel=3,
        )
    if optimizer is None:
        return read
    for parameter in names.values():  # what the checkpoint lacks had not been made when it was written
        optimizer.state.pop(parameter, None)
    for key, (name, slot) in slots.items():
        value, held = flat[key], names[name]
        optimizer.state[held][slot] = value.to(held.device) if value.ndim else value
    set_options(optimizer, options)
    return read


def _told(
    path: str | Path, stored: Mapping[str, TensorStorageMetadata], names: Mapping[str, Tensor]
) -> dict[str, Options]:
    """The options of these parameters that a checkpoint holds."""
    if not any(key.startswith(_OPTIONS) for key in stored):
        raise InputError(f"the checkpoint {path} holds no optimizer")
    flat: dict[str, Any] = {
        _OPTIONS + name: _empty(stored[_OPTIONS + name]) for name in names if _OPTIONS + name in stored
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each rank reads those of its own parameters
        load(flat, checkpoint_id=str(path), no_dist=True)
    return {key.removeprefix(_OPTIONS): from_bytes(data) for key, data in flat.items()}


def _raise_together(refusal: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank what any rank refuses: the others would wait for it."""
    said: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, None if refusal is None else str(refusal), group=group)
    if refusal is not None:
        raise refusal
    for place, words in enumerate(said):
        if words is not None:
            raise InputError(f"rank {global_rank(place, group)} refuses the checkpoint: {words}")


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The whole plain model's `state_dict` from a checkpoint, in one process."""
    stored = _stored(path)
    flat: dict[str, Any] = {key: _empty(meta) for key, meta in stored.items() if key.startswith(_MODEL)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads is what was asked for
        load(flat, checkpoint_id=str(path), no_dist=True)
    return {key.removeprefix(_MODEL): value for key, value in flat.items()}


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder holds a checkpoint of torch.distributed.checkpoint."""
    return (Path(path) / ".metadata").is_file()


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest whole checkpoint among the folders in `folder`, or None.

    The metadata are written last, so a checkpoint that was cut off has none, and does not count.
    """
    found = [p for p in Path(folder).glob("*") if is_checkpoint(p)]
    return max(found, key=lambda p: (p / ".metadata").stat().st_mtime_ns, default=None)


def _stored(path: str | Path) -> dict[str, TensorStorageMetadata]:
    if not is_checkpoint(path):
        raise InputError(f"{path} holds no checkpoint")
    found = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    return {key: meta for key, meta in found.items() if isinstance(meta, TensorStorageMetadata)}


def _empty(meta: TensorStorageMetadata) -> Tensor:
    return torch.empty(meta.size, dtype=meta.properties.dtype)

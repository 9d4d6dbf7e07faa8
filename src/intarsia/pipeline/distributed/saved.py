"""Checkpoints by torch.distributed.checkpoint under the plain model's names, that any cut can load."""

from __future__ import annotations

import json
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

_MODEL, _OPTIMIZER, _GROUPS = "model/", "optimizer/", "optimizer groups"


def save_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's share of the model, and of an optimizer's state, into a folder all ranks write to."""
    flat = {_MODEL + key: value for key, value in state.items()}
    if optimizer is not None:
        for name, parameter in names.items():
            for slot, value in optimizer.state.get(parameter, {}).items():
                flat[f"{_OPTIMIZER}{name}/{slot}"] = (
                    value if isinstance(value, Tensor) else torch.tensor(value)
                )
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        flat[_GROUPS] = torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)
    save(flat, checkpoint_id=str(path), process_group=group)


def load_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read this rank's share, whatever cut and number of ranks wrote it; tensors are filled in place."""
    stored = _stored(path)
    missing = [key for key in state if _MODEL + key not in stored]
    if missing:
        raise InputError(f"the checkpoint {path} lacks {', '.join(missing)}")
    flat: dict[str, Any] = {_MODEL + key: value for key, value in state.items()}
    slots: dict[str, tuple[str, str]] = {}
    if optimizer is not None:
        if _GROUPS not in stored:
            raise InputError(f"the checkpoint {path} holds no optimizer")
        for key in stored:
            name, _, slot = key.removeprefix(_OPTIMIZER).rpartition("/")
            if key.startswith(_OPTIMIZER) and name in names:
                slots[key] = (name, slot)
        flat |= {key: _empty(stored[key]) for key in (*slots, _GROUPS)}
    load(flat, checkpoint_id=str(path), process_group=group)
    if optimizer is None:
        return
    for key, (name, slot) in slots.items():
        parameter: Any = names[name]
        value = flat[key]
        optimizer.state[parameter][slot] = value.to(parameter.device) if value.ndim else value
    for target, given in zip(optimizer.param_groups, json.loads(bytes(flat[_GROUPS].tolist())), strict=True):
        target.update({k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


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

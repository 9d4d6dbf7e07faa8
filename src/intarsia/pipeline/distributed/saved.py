"""Checkpoints by torch.distributed.checkpoint under the plain model's names, which any cut can load.

The options of an optimizer are stored by parameter, since another cut or rank has other groups. Loading
raises if one new group has parameters with different saved options. If one rank raises, all ranks do, before
they read tensors.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from intarsia.errors import InputError
from intarsia.pipeline.distributed.placement import empty_like_parameter
from intarsia.pipeline.distributed.world import World, together
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import form_text
from intarsia.pipeline.stages.tied import global_rank
from intarsia.pipeline.stages.weights import Weights, load_stages, memory_for_stages, misfit_text

Options = dict[str, Any]  # the options of an optimizer by name, such as a learning rate
# The members of a group, which another cut divides differently, and how its steps are computed.
_NOT_SAVED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def options_by_name(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Options]:
    """The options of every parameter of the optimizer.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> options_by_name(torch.optim.SGD([weight], lr=0.5), {"weight": weight})["weight"]["lr"]
    0.5
    """
    by_name: dict[str, Options] = {}
    for group, own in zip(optimizer.param_groups, _names_by_group(optimizer, names), strict=True):
        options = {name: _plain(name, value) for name, value in group.items() if name not in _NOT_SAVED}
        by_name |= dict.fromkeys(own, options)
    return by_name


def options_of_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], saved: Mapping[str, Options]
) -> list[Options]:
    """The saved options for each group. Raises InputError if those of its parameters differ."""
    options = []
    for own in _names_by_group(optimizer, names):
        stored = [name for name in own if name in saved]
        first: Options = saved[stored[0]] if stored else {}
        for name in stored:
            differing = [key for key in first if first[key] != saved[name].get(key)]
            if differing:
                key, other = differing[0], saved[name].get(differing[0])
                raise InputError(
                    f"{stored[0]} was saved with {key}={first[key]} and {name} with {other}, and"
                    " one group of this optimizer has both: create it with the groups that were saved"
                )
        options.append(first)
    return options


def set_options(optimizer: torch.optim.Optimizer, options: Sequence[Options]) -> None:
    """Set the options of each group; an option that is a tensor is filled in place."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for option, value in values.items():
            if isinstance(group.get(option), Tensor):
                group[option].fill_(value)
            else:
                group[option] = tuple(value) if isinstance(value, list) else value


def as_bytes(options: Options) -> Tensor:
    """Options as a tensor, for a checkpoint."""
    return torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Options:
    """The options from a tensor of `as_bytes`."""
    options: Options = json.loads(bytes(data.tolist()))
    return options


def _names_by_group(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in names.items()}
    return [[name_of[id(p)] for p in g["params"] if id(p) in name_of] for g in optimizer.param_groups]


def _plain(option: str, value: Any) -> Any:
    """An option without tensors; a learning rate, for example, may be a tensor."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InputError(f"the optimizer's option {option} is a tensor of {value.numel()} elements")
        return value.item()
    return [_plain(option, one) for one in value] if isinstance(value, list | tuple) else value


_MODEL, _OPTIMIZER, _OPTIONS, _COUNTERS = "model/", "optimizer/", "options/", "counters/"


def save_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    counters: Mapping[str, int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's share of the model and of an optimizer's state. All ranks write to one folder.

    `counters` are numbers that are equal on all ranks.
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
        flat |= {_OPTIONS + n: as_bytes(own) for n, own in options_by_name(optimizer, names).items()}
    save(flat, checkpoint_id=str(path), process_group=group)


def load_checkpoint(
    path: str | Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    keys: Collection[str] | None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, int]:
    """Read this rank's share of a checkpoint into its tensors, and return the saved counters.

    Any cut and number of ranks may have written it. If one rank raises, no rank reads. With `keys`, those of
    the whole model's `state_dict`, a checkpoint with other tensors of a model is refused.
    """
    flat: dict[str, Any] = {_MODEL + key: value for key, value in state.items()}
    slots: dict[str, tuple[str, str]] = {}
    options: list[Options] = []
    counters: list[str] = []
    with together(group, "refuses the checkpoint"):
        stored = _stored(path)
        counters = [key for key in stored if key.startswith(_COUNTERS)]
        flat |= {key: _empty(stored[key]) for key in counters}
        _check_names(path, stored, state, keys)
        if optimizer is not None:
            options = options_of_groups(optimizer, names, _saved_options(path, stored, names))
            for key in stored:
                name, _, slot = key.removeprefix(_OPTIMIZER).rpartition("/")
                if key.startswith(_OPTIMIZER) and name in names:
                    slots[key] = (name, slot)
            for key, (name, _) in slots.items():
                meta = stored[key]
                flat[key] = empty_like_parameter(names[name], meta.size, meta.properties.dtype)
    try:
        load(flat, checkpoint_id=str(path), process_group=group)
    except CheckpointException as error:  # on every rank
        causes = [f"rank {global_rank(r, group)}: {cause[0]!r}" for r, cause in error.failures.items()]
        raise InputError(f"the checkpoint {path} cannot be read: {'; '.join(causes)}") from error
    read = {key.removeprefix(_COUNTERS): int(flat[key]) for key in counters}
    if not read:
        warnings.warn(
            f"the checkpoint {path} has no seed and no number of steps: dropout continues with those of"
            " this pipeline",
            stacklevel=3,
        )
    if optimizer is None:
        return read
    for parameter in names.values():  # a state that is not in the checkpoint did not exist at that time
        optimizer.state.pop(parameter, None)
    # As in torch: a number, such as a count of steps, is on the CPU unless a kernel reads it.
    kernels = [g["params"] for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    on_device = {id(p) for own in kernels for p in own}
    for key, (name, slot) in slots.items():
        value, parameter = flat[key], names[name]
        moves = value.ndim > 0 or id(parameter) in on_device
        optimizer.state[parameter][slot] = value.to(parameter.device) if moves else value
    set_options(optimizer, options)
    return read


def _saved_options(
    path: str | Path, stored: Mapping[str, TensorStorageMetadata], names: Mapping[str, Tensor]
) -> dict[str, Options]:
    """The options of these parameters in a checkpoint."""
    if not any(key.startswith(_OPTIONS) for key in stored):
        raise InputError(f"the checkpoint {path} has no optimizer")
    flat: dict[str, Any] = {
        _OPTIONS + name: _empty(stored[_OPTIONS + name]) for name in names if _OPTIONS + name in stored
    }
    return {key.removeprefix(_OPTIONS): from_bytes(data) for key, data in _read_alone(path, flat).items()}


def _check_names(
    path: str | Path,
    stored: Mapping[str, TensorStorageMetadata],
    state: Mapping[str, Tensor],
    keys: Collection[str] | None,
) -> None:
    """Raise InputError, before anything is read, for a checkpoint of another model."""
    own = {key.removeprefix(_MODEL): meta for key, meta in stored.items() if key.startswith(_MODEL)}
    pairs = [(key, value, own[key]) for key, value in state.items() if key in own]
    problems = {
        "lacks": [key for key in state if key not in own],
        "also has": [] if keys is None else [key for key in own if key not in {*keys}],
        "does not fit:": [
            f"{key} is {form_text(value.dtype, value.shape)}, stored as"
            f" {form_text(meta.properties.dtype, meta.size)}"
            for key, value, meta in pairs
            if value.shape != meta.size
        ],
    }
    if text := misfit_text(problems):
        raise InputError(f"the checkpoint {path} {text}")


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The `state_dict` of the plain model from a checkpoint, in one process."""
    stored = _stored(path)
    flat: dict[str, Any] = {key: _empty(meta) for key, meta in stored.items() if key.startswith(_MODEL)}
    return {key.removeprefix(_MODEL): value for key, value in _read_alone(path, flat).items()}


def _read_alone(path: str | Path, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill these tensors from a checkpoint, without the other ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about no_dist, which is intended
        load(flat, checkpoint_id=str(path), no_dist=True)
    return flat


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is a checkpoint of torch.distributed.checkpoint."""
    return (Path(path) / ".metadata").is_file()


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint among the folders in `folder`, or None.

    The metadata file is written last, so an incomplete checkpoint has none.
    """
    checkpoints = [p for p in Path(folder).glob("*") if is_checkpoint(p)]
    return max(checkpoints, key=lambda p: (p / ".metadata").stat().st_mtime_ns, default=None)


def _stored(path: str | Path) -> dict[str, TensorStorageMetadata]:
    if not is_checkpoint(path):
        raise InputError(f"{path} has no checkpoint")
    try:
        entries = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # of pickle, for a damaged file
        raise InputError(f"the checkpoint {path} cannot be read: {error!r}") from error
    return {key: meta for key, meta in entries.items() if isinstance(meta, TensorStorageMetadata)}


def _empty(meta: TensorStorageMetadata) -> Tensor:
    return torch.empty(meta.size, dtype=meta.properties.dtype)


def materialise(
    stages: StageSequence, weights: Weights, held: Sequence[int], device: torch.device, world: World
) -> None:
    """Allocate memory for the `held` stages, and read their weights. If one rank raises, all ranks do.

    A checkpoint of torch.distributed.checkpoint is not read here: all ranks read it together later.
    """
    with together(world.everyone, "could not load its weights"):
        if is_checkpoint(weights.path):
            memory_for_stages(stages, weights.buffers, held, device)
        else:
            load_stages(stages, weights, held, device)


def weights_of(source: str | Path | Weights | None) -> Weights | None:
    """The weights that the option `weights` names."""
    return source if source is None or isinstance(source, Weights) else Weights(source)

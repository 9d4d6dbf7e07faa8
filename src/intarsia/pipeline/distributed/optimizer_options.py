"""The options of an optimizer by parameter: another cut, or another rank, has other groups.

A new group whose parameters were saved with different options is refused: either choice would be wrong for
some. What one rank refuses, all are told before any tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from intarsia.errors import InputError

Options = dict[str, Any]  # such as a learning rate, by their names


def options_by_name(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Options]:
    """The options of every parameter that the optimizer has.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> options_by_name(torch.optim.SGD([weight], lr=0.5), {"weight": weight})["weight"]["lr"]
    0.5
    """
    found: dict[str, Options] = {}
    for group, own in zip(optimizer.param_groups, _names_by_group(optimizer, names), strict=True):
        told = {option: _plain(option, value) for option, value in group.items() if option != "params"}
        found |= dict.fromkeys(own, told)
    return found


def options_of_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], told: Mapping[str, Options]
) -> list[Options]:
    """The options for each group, of what was told of its parameters; refused where that differs."""
    found = []
    for own in _names_by_group(optimizer, names):
        known = [name for name in own if name in told]
        first: Options = told[known[0]] if known else {}
        for name in known:
            differing = [key for key in first if first[key] != told[name].get(key)]
            if differing:
                key = differing[0]
                raise InputError(
                    f"{known[0]} was saved with {key}={first[key]} and {name} with {told[name].get(key)}, and"
                    " one group of this optimizer holds both: make it with the groups that were saved"
                )
        found.append(first)
    return found


def set_options(optimizer: torch.optim.Optimizer, options: Sequence[Options]) -> None:
    """Give each group its options; those that are tensors keep their memory."""
    for group, told in zip(optimizer.param_groups, options, strict=True):
        for option, value in told.items():
            if isinstance(group.get(option), Tensor):
                group[option].fill_(value)
            else:
                group[option] = tuple(value) if isinstance(value, list) else value


def as_bytes(options: Options) -> Tensor:
    """Options as a tensor, which a checkpoint holds."""
    return torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Options:
    """Options of a tensor."""
    made: Options = json.loads(bytes(data.tolist()))
    return made


def _names_by_group(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in names.items()}
    return [[name_of[id(p)] for p in g["params"] if id(p) in name_of] for g in optimizer.param_groups]


def _plain(option: str, value: Any) -> Any:
    """An option without tensors: a learning rate may be one."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InputError(f"the optimizer's option {option} is a tensor of {value.numel()} elements")
        return value.item()
    return [_plain(option, one) for one in value] if isinstance(value, list | tuple) else value

"""What a program takes and gives: names, dtypes, and shapes where they are fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # a module that is only loaded and run does without networks
    from intarsia.network import Network, Tensor


@dataclass(frozen=True)
class Port:
    """One input or output."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None  # None where a size varies


@dataclass(frozen=True)
class Ports:
    """All inputs and outputs of a program, in order.

    >>> ports = Ports((Port("x", torch.float32, (2, 3)),), (Port("y", torch.int64, None),))
    >>> Ports.from_json(ports.as_json()) == ports
    True
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @staticmethod
    def of(net: Network) -> Ports:
        """Those of a network."""
        return Ports(_ports(net.get_inputs()), _ports(net.get_outputs()))

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {"inputs": [_to_json(p) for p in self.inputs], "outputs": [_to_json(p) for p in self.outputs]}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Ports:
        """What `as_json` wrote; LookupError, TypeError or ValueError for anything else."""
        inputs, outputs = (tuple(_from_json(*item) for item in found[side]) for side in ("inputs", "outputs"))
        return Ports(inputs, outputs)


def _ports(tensors: Iterable[Tensor]) -> tuple[Port, ...]:
    from intarsia.network import dtypes

    return tuple(Port(t.name, dtypes.to_torch(t.dtype), _fixed(t.shape)) for t in tensors)


def _fixed(shape: Iterable[Any]) -> tuple[int, ...] | None:
    sizes = tuple(shape)
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _to_json(port: Port) -> list[Any]:
    shape = None if port.shape is None else list(port.shape)
    return [port.name, str(port.dtype).removeprefix("torch."), shape]


def _from_json(name: str, dtype: str, shape: list[int] | None) -> Port:
    match = getattr(torch, str(dtype))
    if not isinstance(match, torch.dtype):
        raise ValueError(f"{dtype} is not a dtype")
    return Port(str(name), match, None if shape is None else tuple(int(size) for size in shape))

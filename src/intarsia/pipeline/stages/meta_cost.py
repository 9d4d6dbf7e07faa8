"""Costs of a graph without its weights: each node measured on made-up values, or computed from its shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from intarsia.errors import PartitionError
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.stages.cost import measure_node
from intarsia.pipeline.stages.devices import META, on_device


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device computes and moves in a second, for costs that are computed; only the ratio balances."""

    flops: float = 1e12
    bytes: float = 1e11

    def __str__(self) -> str:
        return f"computed for {self.flops / 1e12:g} TFLOP/s and {self.bytes / 1e9:g} GB/s"


def measure_made_up(target: Callable[..., Any], args: Any, kwargs: Any, repeats: int) -> Cost:
    """Measure one node on real memory: values are made up, and given back when it returns.

    Floats are drawn between 0 and 1 and whole numbers are zero, which is an index of any table.
    """
    device = made_up_on()
    given = pytree.tree_map_only(Tensor, lambda t: _made_up(t, device), (args, kwargs))
    try:
        made, options = on_device(given, device)
        return measure_node(target, made, options, repeats)
    except Exception as error:
        raise PartitionError(
            f"{target} cannot be measured on made-up values ({error}); costs='analytic' computes them instead"
        ) from error


def made_up_on() -> torch.device:
    """Where nodes of a model on meta are measured: torch's default device, if it has memory."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def estimate_with(speed: DeviceSpeed) -> Callable[..., Cost]:
    """Costs by count: floating point operations, by torch's counter, and the bytes read and written."""

    def estimate(target: Callable[..., Any], args: Any, kwargs: Any, repeats: int) -> Cost:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        fresh = [_leaf(v) if isinstance(v, Tensor) else v for v in leaves]
        again, options = on_device(pytree.tree_unflatten(fresh, spec), META)
        grown = [v for v in fresh if isinstance(v, Tensor) and v.requires_grad]
        # What works in place may not change a leaf; what autograd sees is one step behind it.
        with FlopCounterMode(display=False) as forward, torch.enable_grad():
            seen, seen_options = pytree.tree_map_only(Tensor, _behind, (again, options))
            value = target(*seen, **seen_options)
        made = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
        moved = _bytes([*(v for v in fresh if isinstance(v, Tensor)), *made]) / speed.bytes
        roots = [v for v in made if v.requires_grad]
        ahead = forward.get_total_flops() / speed.flops + moved
        if not roots or not grown:
            return Cost(ahead)
        weights = [v for v in grown if isinstance(v, torch.nn.Parameter)]
        others = [v for v in grown if not isinstance(v, torch.nn.Parameter)]
        through, onto = (_backward(roots, side) for side in (others, weights))
        return Cost(
            ahead,
            through / speed.flops + moved if others else 0.0,
            onto / speed.flops + _bytes(weights) / speed.bytes + (0.0 if others else moved),
        )

    return estimate


def _backward(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> int:
    if not leaves:
        return 0
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(
            roots, leaves, [torch.ones_like(r) for r in roots], retain_graph=True, allow_unused=True
        )
    return int(counter.get_total_flops())


def _leaf(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device=META)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty.requires_grad_(value.requires_grad)


def _behind(value: Tensor) -> Tensor:
    return value.view_as(value) if value.requires_grad else value


def _made_up(value: Tensor, device: torch.device) -> Tensor:
    if not value.is_meta:
        return value.to(device)
    # In the layout of the value, which may be expanded: the memory behind it, seen through its strides.
    steps = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if value.numel() else 0
    memory = torch.zeros(extent, dtype=value.dtype, device=device)
    if value.is_floating_point():
        memory.uniform_()
    made = memory.as_strided(value.shape, value.stride())
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made.requires_grad_(value.requires_grad)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)

"""Replacement of the devices in a graph, and models on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from intarsia.errors import CaptureError

META = torch.device("meta")


def on_device(value: Any, device: torch.device) -> Any:
    """A node's arguments with every device replaced, also in the bodies of higher-order operators.

    >>> on_device({"dtype": torch.int64, "device": META}, torch.device("cpu"))
    {'dtype': torch.int64, 'device': device(type='cpu')}
    """
    if isinstance(value, torch.device):
        return device
    if isinstance(value, tuple | list):
        return type(value)(on_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: on_device(v, device) for k, v in value.items()}
    if isinstance(value, fx.GraphModule):  # the body of a higher-order operator
        body = copy.deepcopy(value)
        retarget(body, device)
        return body
    return value


def retarget(program: nn.Module, device: torch.device) -> None:
    """Make a graph create its tensors (by `arange`, `zeros`) on `device`."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = on_device(node.args, device)
                node.kwargs = on_device(node.kwargs, device)
            module.recompile()


def is_on_meta(model: nn.Module) -> bool:
    """Whether the model's parameters are on the meta device. Raises CaptureError if only some are."""
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    real = [name for name, p in model.named_parameters() if not p.is_meta]
    if meta and real:
        raise CaptureError(
            f"{meta[0]} is on the meta device and {real[0]} is not; build all parameters there"
        )
    return bool(meta)


def to_meta(example: Any) -> Any:
    """An example call, or the states of a graph, on the meta device; parameters stay parameters."""
    return pytree.tree_map_only(torch.Tensor, _meta_tensor, example)


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Move a model's real buffers to the meta device for a while. Yields their values by name.

    A model on the meta device may have computed buffers, such as rotary tables: their values are kept.
    """
    values = {n: b for n, b in model.named_buffers(remove_duplicate=False) if not b.is_meta}
    before = [(m, dict(m._buffers)) for m in model.modules()]
    moved: dict[int, torch.Tensor] = {}
    for module, buffers in before:
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(META))
    try:
        yield values
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def _meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to(META), requires_grad=tensor.requires_grad)
    return tensor.to(META)


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The values of non-persistent buffers on the meta device, if the model can compute them.

    `_init_weights` of Hugging Face models fills the buffers of a module; `from_pretrained` calls it for the
    same purpose. It runs twice, on memory with different contents. If the results are equal, they depend only
    on the model's configuration. Other buffers are not in the result.
    """
    fill = getattr(model, "_init_weights", None)
    values: dict[str, Tensor] = {}
    if not callable(fill):
        return values
    for path, module in model.named_modules():
        buffers = {n: module._buffers.get(n) for n in module._non_persistent_buffers_set}
        names = [n for n, buffer in buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        runs = [_filled(fill, module, names, start) for start in (0, 1)]
        for name in names:
            first, second = (run.get(name) for run in runs)
            if first is not None and second is not None and torch.equal(first, second):
                values[f"{path}.{name}" if path else name] = first
    return values


def _filled(fill: Any, module: nn.Module, names: list[str], start: int) -> dict[str, Tensor]:
    """The module's buffers after `fill` on a copy of the module, in which only these buffers have memory."""
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    for name in names:
        twin._buffers[name] = torch.full_like(module._buffers[name], start, device="cpu")  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        fill(twin)
    return {name: b for name in names if (b := twin._buffers[name]) is not None}

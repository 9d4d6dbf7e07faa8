"""Buffers that a model computes and does not save, computed again for a model on the meta device.

A buffer that no file holds is never guessed: the model's own `_init_weights` makes it twice, from different
memory, and it is taken if both agree.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The values of unsaved buffers on the meta device, where the model itself knows how to make them.

    Models of Hugging Face do: `_init_weights`, which their `from_pretrained` calls for the same purpose,
    fills the buffers of one module. It is called twice on memory with different contents: what comes out
    equal was computed from nothing but the model's configuration. Other buffers are left out.
    """
    fill = getattr(model, "_init_weights", None)
    found: dict[str, Tensor] = {}
    if not callable(fill):
        return found
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if _is_meta(module._buffers.get(n))]
        if not names:
            continue
        runs = [_filled(fill, module, names, start) for start in (0, 1)]
        for name in names:
            first, second = (run.get(name) for run in runs)
            if first is not None and second is not None and torch.equal(first, second):
                found[f"{path}.{name}" if path else name] = first
    return found


def _is_meta(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta


def _filled(fill: Any, module: nn.Module, names: list[str], start: int) -> dict[str, Tensor]:
    """The module's buffers after `fill`, which works on a twin of it: only its buffers have memory."""
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    for name in names:
        twin._buffers[name] = torch.full_like(module._buffers[name], start, device="cpu")  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        fill(twin)
    return {name: b for name in names if (b := twin._buffers[name]) is not None}

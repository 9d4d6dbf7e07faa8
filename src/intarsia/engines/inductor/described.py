"""Inputs as a graph describes them: sizes and strides without contents."""

from __future__ import annotations

import torch


def has_fixed_sizes(described: torch.Tensor) -> bool:
    """Whether a tensor's sizes and strides are numbers."""
    return all(isinstance(size, int) for size in (*described.shape, *described.stride()))


def empty_like(described: torch.Tensor) -> torch.Tensor:
    """A tensor of these sizes and strides, which are numbers."""
    sizes, strides = described.shape, described.stride()
    return torch.empty_strided(sizes, strides, dtype=described.dtype, device=described.device)

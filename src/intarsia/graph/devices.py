"""Where a graph's values are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx


def values_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node makes."""
    result = node.meta.get("val")
    for value in result if isinstance(result, list | tuple) else [result]:
        if isinstance(value, torch.Tensor):
            yield value


def uses_gpu(graph: fx.Graph) -> bool:
    """Whether any value of a graph is on an NVIDIA GPU."""
    return any(value.is_cuda for node in graph.nodes for value in values_of(node))

"""A trial: the model runs, and neither its buffers nor the random state are changed by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Put back the buffers, also those that the model rebinds, and the random state.

    >>> norm = nn.BatchNorm1d(2)
    >>> with trial(norm):
    ...     norm(torch.randn(4, 2)).shape
    torch.Size([4, 2])
    >>> int(norm.num_batches_tracked)
    0
    """
    held = [(module, dict(module._buffers)) for module in model.modules()]
    values = {id(b): b.clone() for _, buffers in held for b in buffers.values() if b is not None}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for module, buffers in held:
                module._buffers.update(buffers)
                for buffer in buffers.values():
                    if buffer is not None:
                        buffer.copy_(values[id(buffer)])

"""Large tensors a slice at a time: what is computed of a slice stays in a cache.

Logits are millions of numbers. Comparing them as float64 with a dozen temporaries took a third of compiling
GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

SLICE = 1 << 17  # elements; of fewer, a second thread's start costs more than it gains
_ELSEWHERE = 1 << 24  # on a device the start of a kernel costs more than its memory does


def slices_of(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Slices of tensors of as many elements, side by side, without their shapes.

    >>> [(a.tolist(), b.tolist()) for a, b in slices_of(torch.ones(2, 1), torch.zeros(2))]
    [([1.0, 1.0], [0.0, 0.0])]
    """
    flat = [tensor.detach().resolve_neg().reshape(-1) for tensor in tensors]
    length = SLICE if flat[0].device.type == "cpu" else _ELSEWHERE
    return zip(*(torch.split(tensor, length) for tensor in flat), strict=True)

"""Empty tensors that carry an autograd edge and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """The phony of a device: a tensor without elements, made once, used to order the backward pass.

    >>> get_phony(torch.device("cpu"), requires_grad=False).shape
    torch.Size([0])
    """
    key = (device, requires_grad)
    if key not in _phonies:
        # An inference tensor could never enter an autograd graph, and this one outlives the caller's mode.
        with torch.inference_mode(False):
            _phonies[key] = torch.empty(0, device=device, requires_grad=requires_grad)
    return _phonies[key]

"""Noticing that a model averages over tokens itself, where no graph shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MEANS = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}
_MEAN = 1  # how aten writes reduction="mean"


class TokenMeans(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a mean of negative log likelihoods is computed while it is active.

    >>> with TokenMeans() as seen:
    ...     _ = torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))
    >>> seen.found
    True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: bool = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket in _MEANS:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            self.found |= (given | dict(kwargs or {})).get("reduction", _MEAN) == _MEAN
        return func(*args, **(kwargs or {}))

"""`nn.TransformerEncoder` as eager runs it: its fast path differs in padded rows, and is not traced.

In evaluation and without gradients eager packs the rows that `src_key_padding_mask` leaves, and gives zeros
for the others before the final norm. It does so only if the padding is at the end of every row, which it asks
of the values; under export it takes the other path. The zeros are put into the graph here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def fast_paths_traced(model: nn.Module) -> Iterator[None]:
    """While this holds, every TransformerEncoder of the model gives what its fast path would."""
    encoders = [m for m in model.modules() if _has_fast_path(m) and "forward" not in vars(m)]
    for encoder in encoders:
        encoder.__dict__["forward"] = _with_zeros(encoder)
    try:
        yield
    finally:
        for encoder in encoders:
            del encoder.__dict__["forward"]


def _has_fast_path(module: nn.Module) -> bool:
    if (
        not isinstance(module, nn.TransformerEncoder)
        or type(module).forward is not nn.TransformerEncoder.forward
    ):
        return False
    return bool(getattr(module, "use_nested_tensor", False)) and torch.backends.mha.get_fastpath_enabled()


def _with_zeros(encoder: Any) -> Callable[..., torch.Tensor]:
    @functools.wraps(encoder.forward)
    def forward(
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        plain = functools.partial(nn.TransformerEncoder.forward, encoder)
        if src_key_padding_mask is None or mask is not None or src.dim() != 3 or torch.is_autocast_enabled():
            return plain(src, mask, src_key_padding_mask, is_causal)
        norm, encoder.norm = encoder.norm, None
        try:
            output = plain(src, mask, src_key_padding_mask, is_causal)
        finally:
            encoder.norm = norm
        padded = (
            src_key_padding_mask if src_key_padding_mask.dtype is torch.bool else src_key_padding_mask != 0
        )
        if getattr(encoder, "mask_check", True):
            at_the_end = (padded[:, 1:] >= padded[:, :-1]).all()
            padded = padded & at_the_end
        output = output.masked_fill(padded.unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    return forward

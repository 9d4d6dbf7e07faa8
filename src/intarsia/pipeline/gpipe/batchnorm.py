"""Batch normalization whose running statistics are those of the mini-batch, not of its micro-batches."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from intarsia.pipeline.gpipe.checkpoint import is_recomputing


class DeferredBatchNorm(_BatchNorm):
    """Collects the statistics of all micro-batches, and updates the running ones once per mini-batch.

    Each micro-batch is normalized by its own statistics. The moments are merged pairwise (Chan, Golub and
    LeVeque), which is accurate also if the mean is much larger than the deviation.

    >>> norm = DeferredBatchNorm(3, chunks=2)
    >>> _ = norm(torch.rand(4, 3)), norm(torch.rand(4, 3))
    >>> int(norm.num_batches_tracked)
    1
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.chunks = chunks
        self.begin(chunks)

    def begin(self, chunks: int) -> None:
        """Start a mini-batch of `chunks` micro-batches; the statistics of an unfinished one are dropped."""
        self.expected = chunks
        self.seen: int = 0
        self.count: int = 0
        # Plain attributes, not buffers: the state dict stays that of an ordinary batch norm.
        self.mean: Tensor | None = None
        self.deviation: Tensor | None = None  # the sum of squared differences from the mean

    @property
    def sum(self) -> Tensor:
        """The sum over the current mini-batch so far."""
        return torch.zeros_like(self.running_mean) if self.mean is None else self.mean * self.count

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs a batch and a channel dimension, got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        # A recomputed micro-batch was counted when it was computed.
        if not is_recomputing():
            self._track(input)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @torch.no_grad()
    def _track(self, input: Tensor) -> None:
        dims = [d for d in range(input.dim()) if d != 1]
        # Half precision is too coarse for the statistics.
        values = input.detach().to(torch.promote_types(input.dtype, torch.float32))
        variance, mean = torch.var_mean(values, dims, correction=0)
        count = values.numel() // values.size(1)
        deviation = variance * count
        if self.mean is None or self.deviation is None:
            self.mean, self.deviation, self.count = mean, deviation, count
        else:
            total = self.count + count
            delta = mean - self.mean
            self.mean = self.mean + delta * (count / total)
            self.deviation = self.deviation + deviation + delta.square() * (self.count * count / total)
            self.count = total
        self.seen += 1
        if self.seen >= self.expected:
            self._commit()

    def _commit(self) -> None:
        """Update the running statistics with the mini-batch, as an ordinary batch norm would."""
        assert self.mean is not None and self.deviation is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        # The running variance is the unbiased one.
        variance = self.deviation / max(self.count - 1, 1)
        self.running_mean.lerp_(self.mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        self.begin(self.chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """Replace every batch norm that has running statistics, with the same parameters and buffers.

        >>> type(DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm2d(3), chunks=4)).__name__
        'DeferredBatchNorm'
        """
        return cls._convert(module, chunks, {})

    @classmethod
    def _convert(cls, module: nn.Module, chunks: int, converted: dict[nn.Module, nn.Module]) -> nn.Module:
        """The converted module. A module that is used twice is converted once."""
        if module in converted:
            return converted[module]
        converted[module] = module
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            if not (isinstance(module, cls) and module.chunks == chunks):
                converted[module] = cls._from(module, chunks)
            return converted[module]
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = cls._convert(child, chunks, converted)
        return module

    @classmethod
    def _from(cls, norm: _BatchNorm, chunks: int) -> DeferredBatchNorm:
        if isinstance(norm, nn.SyncBatchNorm):
            raise TypeError("SyncBatchNorm cannot be deferred: its statistics come from other processes")
        if norm.running_mean is None or not hasattr(norm, "num_features"):
            raise TypeError(f"{type(norm).__name__} has no statistics yet; run it once before it is deferred")
        deferred = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, chunks)
        deferred.weight, deferred.bias = cast(Any, norm.weight), cast(Any, norm.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            deferred._buffers[name] = norm._buffers[name]
        return deferred.train(norm.training)

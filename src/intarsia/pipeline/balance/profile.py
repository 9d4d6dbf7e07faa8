"""What each layer costs: time, measured; memory, by what stays alive for the backward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.logs import counted
from intarsia.pipeline.balance.cache import CostCache, probe_key
from intarsia.pipeline.balance.probe import LayerProbe, detach, layerwise_sandbox, live_bytes, probes
from intarsia.pipeline.gpipe.microbatch import Batch

__all__ = ["detach", "layerwise_sandbox", "profile_sizes", "profile_times"]

WARM_UPS = 2
LEAST_RUNS = 3


def profile_times(
    module: nn.Sequential,
    sample: Any,
    timeout: float,
    device: torch.device,
    *,
    recompute: bool = True,
    cache: bool = True,
    progress: bool = True,
) -> list[float]:
    """The seconds each layer takes for a training step on the sample: forward, backward (the gradient of
    its input included) and, with `recompute`, forward once more for checkpointing.

    Each layer is warmed up and then run for its share of `timeout`, three times at least; the median counts.
    """
    costs = CostCache(cache)
    seconds = []
    kind = f"time recompute={recompute}"
    layers = probes(module, sample, device)
    for probe in counted(layers, len(module), "profiling time") if progress else layers:
        key = probe_key(probe, device, kind) if cache else None
        known = costs.get(key)
        if known is None:
            known = _measure(probe, timeout / len(module), device, recompute)
            costs.put(key, known)
        else:
            probe.forward(*probe.inputs())  # the next layer needs its output
        seconds.append(known)
    costs.save()
    return seconds


def _measure(probe: LayerProbe, budget: float, device: torch.device, recompute: bool) -> float:
    for _ in range(WARM_UPS):
        _step(probe, device, recompute)
    runs: list[float] = []
    while len(runs) < LEAST_RUNS or sum(runs) < budget:
        runs.append(_step(probe, device, recompute))
    return statistics.median(runs)


def _step(probe: LayerProbe, device: torch.device, recompute: bool) -> float:
    """The seconds of one training step of a layer."""
    batch, tracker = probe.inputs()
    gradients: list[Tensor] | None = None
    _synchronize(device)
    start = time.perf_counter()
    outputs = [y for y in probe.forward(batch, tracker) if y.requires_grad]
    _synchronize(device)
    forward = time.perf_counter() - start
    backward = 0.0
    if outputs:
        gradients = [torch.ones_like(y) for y in outputs]
        _synchronize(device)
        start = time.perf_counter()
        torch.autograd.backward(outputs, gradients)
        _synchronize(device)
        backward = time.perf_counter() - start
    return (2 if recompute else 1) * forward + backward


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile_sizes(
    module: nn.Sequential,
    input: Any,
    chunks: int,
    param_scale: float,
    device: torch.device,
    *,
    progress: bool = True,
) -> list[int]:
    """The bytes each layer takes in training: what one micro-batch leaves alive for the backward pass,
    and `param_scale` times its parameters.

    On a CUDA device the allocator is asked; elsewhere the bytes are counted, tensor by tensor, on a few
    samples: they grow by the same amount with every sample.
    """
    if chunks < 1:
        raise ValueError(f"the number of chunks must be positive, got {chunks}")
    samples = -(-Batch(input)[0].size(0) // chunks)
    few = [samples] if device.type == "cuda" or samples <= 3 else [2, 3]
    alive = [_alive(module, _cut(input, count), device, progress) for count in few]
    parameters = [sum(_storage_bytes(p) for p in _distinct(layer.parameters())) for layer in module]
    sizes = []
    for i, parameter_bytes in enumerate(parameters):
        latent: float = alive[0][i]
        if len(few) == 2:
            latent += (samples - few[0]) * (alive[1][i] - alive[0][i])
        sizes.append(int(latent + parameter_bytes * param_scale))
    return sizes


def _alive(module: nn.Sequential, sample: Any, device: torch.device, progress: bool) -> list[int]:
    alive = []
    layers = probes(module, sample, device)
    for probe in counted(layers, len(module), "profiling memory") if progress else layers:
        batch, tracker = probe.inputs()
        if device.type != "cuda":
            alive.append(live_bytes(probe, batch, tracker))
            continue
        probe.forward(*probe.inputs())  # workspaces and the like are not of one micro-batch
        probe.output = None
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        kept = probe.forward(batch, tracker)
        torch.cuda.synchronize(device)
        alive.append(torch.cuda.memory_allocated(device) - before)
        del kept
    return alive


def _cut(input: Any, count: int) -> Any:
    """The first samples of a mini-batch."""
    batch = Batch(input)
    batch[:] = tuple(x if x.dim() == 0 else x[:count].detach().requires_grad_(x.requires_grad) for x in batch)
    return batch.value


def _distinct(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list({p.untyped_storage().data_ptr(): p for p in parameters}.values())


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()

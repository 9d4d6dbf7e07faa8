"""What crosses each border under the caller's autocast: the dtypes that the stages will really give.

Every rank runs all stages on fake tensors once for each precision, so receive buffers are right before the
first tensor arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.compiled import CompiledStage
from intarsia.pipeline.stages.signature import TensorSpec

Specs = tuple[TensorSpec | str, ...]
Borders = list[tuple[Specs, Specs]]  # what each stage takes and gives
Precision = torch.dtype | None


def current_precision(device: torch.device) -> Precision:
    """The dtype autocast computes in on a device now; None without autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def uncached_autocast(device: torch.device) -> Iterator[None]:
    """The caller's autocast without its cache of weights, which would join the graphs of micro-batches."""
    dtype = current_precision(device)
    if dtype is None:
        yield
        return
    with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
        yield


def refuse_autocast(stages: Sequence[nn.Module], device: torch.device) -> None:
    """Refuse autocast around compiled stages."""
    if current_precision(device) is not None and any(isinstance(s, CompiledStage) for s in stages):
        raise PartitionError(
            "compiled stages compute in the precision they were compiled in; call without autocast"
        )


def borders_under_autocast(
    stages: Sequence[nn.Module], borders: Borders, lengths: Mapping[str, int], device: torch.device
) -> Borders:
    """The borders with the dtypes and shapes found by running every stage on fake tensors, in order.

    Autocast changes what an operation gives, so the dtypes of the capture do not hold. Nothing is allocated.
    """
    if current_precision(device) is None:
        return borders
    found: Borders = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), uncached_autocast(device):
        values = [_fake(spec, lengths, device) for spec in borders[0][0]]
        takes = borders[0][0]
        for i, (stage, (_, gives)) in enumerate(zip(stages, borders, strict=True)):
            values = _run(stage, values, mode, device)
            gives = tuple(
                as_found(spec, value.shape, value.dtype, lengths, i) if isinstance(spec, TensorSpec) else spec
                for spec, value in zip(gives, values, strict=True)
            )
            found.append((takes, gives))
            takes = gives
    return found


def _fake(spec: TensorSpec | str, lengths: Mapping[str, int], device: torch.device) -> torch.Tensor:
    if isinstance(spec, str):
        raise PartitionError(
            f"{spec}, a number read from data, crosses a border; choose other cuts with cuts=..."
        )
    return torch.empty(spec.sizes(lengths), dtype=spec.dtype, device=device)


def _run(
    stage: nn.Module, values: Sequence[torch.Tensor], mode: FakeTensorMode, device: torch.device
) -> list[torch.Tensor]:
    states = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]
    fakes = {
        name: torch.empty_like(mode.from_tensor(t, static_shapes=True), device=device) for name, t in states
    }
    return list(torch.func.functional_call(stage, fakes, tuple(values), tie_weights=False))


def as_found(
    spec: TensorSpec, shape: Sequence[int], dtype: torch.dtype, lengths: Mapping[str, int], stage: int
) -> TensorSpec:
    """A value that crosses as it was found by running the stage; its shape must be the expected one."""
    if tuple(shape) != spec.sizes(lengths):
        raise PartitionError(f"stage {stage} gives {tuple(shape)} for {spec}")
    return replace(spec, dtype=dtype)

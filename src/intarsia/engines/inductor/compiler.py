"""Compiling a graph with TorchInductor; its module is imported when a piece is built, not before."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from intarsia.engines.inductor.described import LEAST, empty_like, has_fixed_sizes, too_small
from intarsia.errors import near_names

Compiled = Callable[..., Sequence[Any]]


def compile_graph(
    module: fx.GraphModule, described: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Compiled:
    """Inductor's program for a graph that it may change, for tensors as described."""
    import torch._inductor

    result: Compiled
    if all(map(has_fixed_sizes, described)):
        with torch.no_grad():
            result = torch._inductor.compile(module, list(map(empty_like, described)), options=dict(options))
        return result
    from intarsia.engines.inductor.varying import VaryingInputs

    inputs = VaryingInputs(described)
    with torch.no_grad(), inputs.tracing():
        result = torch._inductor.compile(module, inputs.tensors, options=dict(options))
    inputs.check()
    return result


def package_graph(module: fx.GraphModule, example: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """The same as a package of AOTInductor's: a shared library with its weights."""
    import torch._inductor

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(module, tuple(example))
        path = str(Path(folder, "package.pt2"))
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=dict(options))
        return Path(path).read_bytes()


def read_package(data: bytes) -> Compiled:
    """What a package computes; torch unpacks its library into a temporary folder, and runs it."""
    import torch._inductor

    return torch._inductor.aoti_load_package(io.BytesIO(data))


def unknown_option(options: Mapping[str, Any]) -> str | None:
    """A clause about the first option that this torch's Inductor does not have; None if it has them all."""
    if not options:
        return None
    import torch._inductor

    known = torch._inductor.list_options()
    for name in options:
        if name not in known:
            hint = near_names(name, known)
            return f"Inductor of torch {torch.__version__} has no option {name!r}{hint}"
    return None


# Calls of what Inductor compiled: its code presumes the strides that it was compiled for.


class InductorProgram:
    """A compiled graph; an input laid out otherwise is copied into the layout that it was compiled for.

    That is contiguous where sizes vary. Its code does not cover sizes below 2: calls with them run the graph
    itself, operator by operator.
    """

    def __init__(
        self, compiled: Compiled, described: Sequence[torch.Tensor], graph: fx.GraphModule | None = None
    ) -> None:
        self._compiled = compiled
        self._strides = [tensor.stride() if has_fixed_sizes(tensor) else None for tensor in described]
        varying = [
            (place, axis)
            for place, tensor in enumerate(described)
            for axis, size in enumerate(tensor.shape)
            if isinstance(size, torch.SymInt) and too_small(size) is not None
        ]
        self._small = (graph, varying) if graph is not None and varying else None

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        if self._small is not None:
            graph, varying = self._small
            if any(inputs[place].shape[axis] < LEAST for place, axis in varying):
                with torch.no_grad():
                    return tuple(graph(*inputs))
        laid_out = [
            tensor if tensor.stride() == strides else _restride(tensor, strides)
            for tensor, strides in zip(inputs, self._strides, strict=True)
        ]
        with torch.no_grad():
            return tuple(self._compiled(*laid_out))


def _restride(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    if strides is None:
        return tensor.contiguous()
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)

"""The one place that names TorchInductor's own module; it is imported when a piece is built, not before."""

from __future__ import annotations

import difflib
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from intarsia.engines.inductor.described import empty_like, has_fixed_sizes

Compiled = Callable[..., Sequence[Any]]


def compile_graph(
    module: fx.GraphModule, described: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Compiled:
    """What Inductor makes of a graph that it may change, for tensors as described."""
    import torch._inductor

    made: Compiled
    if all(map(has_fixed_sizes, described)):
        with torch.no_grad():
            made = torch._inductor.compile(module, list(map(empty_like, described)), options=dict(options))
        return made
    from intarsia.engines.inductor.varying import VaryingInputs

    inputs = VaryingInputs(described)
    with torch.no_grad(), inputs.tracing():
        made = torch._inductor.compile(module, inputs.tensors, options=dict(options))
    inputs.check()
    return made


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
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; near are {', '.join(near)}" if near else ""
            return f"Inductor of torch {torch.__version__} has no option {name!r}{hint}"
    return None

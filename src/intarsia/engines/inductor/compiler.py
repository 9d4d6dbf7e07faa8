"""The one place that names TorchInductor's own module; it is imported when a piece is built, not before."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

Compiled = Callable[..., Sequence[Any]]


def compile_graph(module: fx.GraphModule, example: Sequence[Any], options: Mapping[str, Any]) -> Compiled:
    """What Inductor makes of a graph that it may change, for tensors laid out like those of `example`."""
    import torch._inductor

    with torch.no_grad():
        made: Compiled = torch._inductor.compile(module, list(example), options=dict(options))
    return made


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

"""Which rewrites pay for a graph on this GPU: its kernels are timed with and without each, and remembered.

The graph runs operator by operator inside a CUDA graph, so that kernels are timed and launching is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

from intarsia.cache.machine import digest, package_version
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.engines.graph_rewrites.apply import apply_rewrites, own_copy
from intarsia.engines.graph_rewrites.replayed import ratio, recorded

PAYS = 0.99  # time with over time without, below which a rewrite is made


def paying(module: fx.GraphModule, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the rewrites that make this graph faster, each tried beside the ones kept before it."""
    store = JsonStore(cache_directory() / "graph_rewrites.json")
    key = _key(module, names)
    known = store.read().get(key)
    if isinstance(known, list) and all(name in names for name in known):
        return tuple(known)
    try:
        remaining = _measured(module, names)
    except RuntimeError as error:  # no room for it, or nothing that a CUDA graph can hold
        said = next(iter(str(error).splitlines()), "")
        warnings.warn(
            f"rewrites could not be measured, so all are made: {type(error).__name__}: {said}", stacklevel=3
        )
        return tuple(names)
    store.update({key: list(remaining)})
    return remaining


def _measured(module: fx.GraphModule, names: Sequence[str]) -> tuple[str, ...]:
    remaining: tuple[str, ...] = ()
    best = _recorded(module, remaining)
    for name in names:
        if not apply_rewrites(own_copy(module), (*remaining, name))[name]:
            continue
        tried = _recorded(module, (*remaining, name))
        if ratio(tried, best) < PAYS:
            remaining, best = (*remaining, name), tried
    return remaining


def _recorded(module: fx.GraphModule, names: Sequence[str]) -> Callable[[], float]:
    """Times the graph after these rewrites."""
    graph_module = own_copy(module)
    apply_rewrites(graph_module, names)
    inputs = [_zeros(node) for node in module.graph.nodes if node.op == "placeholder"]
    return recorded(lambda: graph_module(*inputs))


def _zeros(node: fx.Node) -> torch.Tensor:
    """An input laid out as described; zeros are indices into anything."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()


def _key(module: fx.GraphModule, names: Sequence[str]) -> str:
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {package_version('intarsia')}"]
    lines += names
    for node in module.graph.nodes:
        described = node.meta.get("val")
        values = described if isinstance(described, list | tuple) else [described]
        laid_out = [
            (value.dtype, tuple(value.shape), tuple(value.stride()))
            for value in values
            if isinstance(value, torch.Tensor)
        ]
        lines.append(f"{node.format_node()} {laid_out}")
    return digest(*lines)

"""The rewrites by name, how they are applied, and which of them are faster on this GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx, nn

from intarsia.cache.machine import digest, package_version
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.engines.graph_rewrites.convolutions import (
    channels_last,
    fold_batch_norms,
    fuse_convolutions,
    patch_convolutions_as_products,
)
from intarsia.engines.graph_rewrites.fused_products import activation_epilogues, flash_attention, row_products
from intarsia.engines.graph_rewrites.products import merge_products, split_products, vector_products
from intarsia.engines.graph_rewrites.replayed import ratio, recorded
from intarsia.errors import error_text

Rewrite = Callable[[fx.GraphModule], int]

REWRITES: dict[str, Rewrite] = {
    "batch_norms": fold_batch_norms,
    "fused_convolutions": fuse_convolutions,
    "patch_convolutions": patch_convolutions_as_products,
    "row_products": row_products,
    "merged_products": merge_products,
    "activation_epilogues": activation_epilogues,
    "flash_attention": flash_attention,
    "split_products": split_products,
    "vector_products": vector_products,
    "channels_last": channels_last,
}


def apply_rewrites(module: fx.GraphModule, names: Iterable[str]) -> dict[str, int]:
    """Run rewrites by name, in that order; how often each one was applied."""
    counts = {name: REWRITES[name](module) for name in names}
    if any(counts.values()):
        module.graph.eliminate_dead_code()
        module.graph.lint()
        used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
        for name in [name for name in module._buffers if name not in used]:
            delattr(module, name)
        module.recompile()
    return counts


def own_copy(module: fx.GraphModule) -> fx.GraphModule:
    """The graph for an engine to change, its weights as buffers; they are shared, not copied."""
    root = nn.Module()
    for node in module.graph.nodes:
        name = str(node.target)
        if node.op != "get_attr" or hasattr(root, name):
            continue
        value = getattr(module, name)
        if isinstance(value, torch.Tensor):
            root.register_buffer(name, value)
        else:  # the body of a loop or a choice
            setattr(root, name, value)
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    return fx.GraphModule(root, graph)


# Which rewrites pay for a graph on this GPU: its kernels are timed with and without each, and remembered.
#
# The graph runs operator by operator inside a CUDA graph, so that kernels are timed and launching is not.

PAYS = 0.99  # time with over time without, below which a rewrite is made


def paying(module: fx.GraphModule, names: Sequence[str]) -> tuple[str, ...]:
    """The rewrites that make this graph faster, each tried together with those selected before it."""
    store = JsonStore(cache_directory() / "graph_rewrites.json")
    key = _key(module, names)
    known = store.read().get(key)
    if isinstance(known, list) and all(name in names for name in known):
        return tuple(known)
    try:
        remaining = _measured(module, names)
    except RuntimeError as error:  # no room for it, or nothing that a CUDA graph can hold
        warnings.warn(f"rewrites were not measured, so all are applied: {error_text(error)}", stacklevel=3)
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

"""Rewrites of ATen graphs, for engines that read graphs: less memory moved, fewer and larger products.

A rewrite edits a graph module in place, which is the engine's own copy, and keeps its answers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from intarsia.engines.graph_rewrites.merged_products import merge_products
from intarsia.engines.graph_rewrites.patch_convolution import patch_convolutions_as_products

Rewrite = Callable[[fx.GraphModule], int]

REWRITES: dict[str, Rewrite] = {
    "patch_convolutions": patch_convolutions_as_products,
    "merged_products": merge_products,
}


def apply_rewrites(module: fx.GraphModule, names: Iterable[str]) -> dict[str, int]:
    """Run rewrites by name, in that order; how often each one was applied."""
    counts = {name: REWRITES[name](module) for name in names}
    if any(counts.values()):
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return counts

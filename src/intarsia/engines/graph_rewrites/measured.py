"""Which rewrites pay for a graph on this GPU: its kernels are timed with and without each, and remembered.

The graph runs operator by operator inside a CUDA graph, so that kernels are timed and launching is not.
"""

from __future__ import annotations

import hashlib
import statistics
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

from intarsia.cache.directory import cache_directory
from intarsia.cache.machine import package_version
from intarsia.cache.store import JsonStore
from intarsia.engines.graph_rewrites.apply import apply_rewrites, own_copy

PAYS = 0.99  # time with over time without, below which a rewrite is made
_ROUNDS, _REPLAYS = 7, 5


def paying(module: fx.GraphModule, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the rewrites that make this graph faster, each tried beside the ones kept before it."""
    store = JsonStore(cache_directory() / "graph_rewrites.json")
    key = _key(module, names)
    known = store.read().get(key)
    if isinstance(known, list) and all(name in names for name in known):
        return tuple(known)
    try:
        kept = _measured(module, names)
    except RuntimeError as error:  # no room for it, or nothing that a CUDA graph can hold
        said = next(iter(str(error).splitlines()), "")
        warnings.warn(
            f"rewrites could not be measured, so all are made: {type(error).__name__}: {said}", stacklevel=3
        )
        return tuple(names)
    store.update({key: list(kept)})
    return kept


def _measured(module: fx.GraphModule, names: Sequence[str]) -> tuple[str, ...]:
    kept: tuple[str, ...] = ()
    best = _recorded(module, kept)
    for name in names:
        if not apply_rewrites(own_copy(module), (*kept, name))[name]:
            continue
        tried = _recorded(module, (*kept, name))
        if _ratio(tried, best) < PAYS:
            kept, best = (*kept, name), tried
    return kept


def _recorded(module: fx.GraphModule, names: Sequence[str]) -> Callable[[], float]:
    """Times a few replays of the graph after these rewrites, in milliseconds."""
    graph_module = own_copy(module)
    apply_rewrites(graph_module, names)
    inputs = [_zeros(node) for node in module.graph.nodes if node.op == "placeholder"]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    recorded = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(2):
                graph_module(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(recorded, stream=side, capture_error_mode="thread_local"):
            result = graph_module(*inputs)
    held = (graph_module, inputs, result)

    def time() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_REPLAYS):
            recorded.replay()
        end.record()
        end.synchronize()
        assert held  # what the graph reads and writes
        return float(start.elapsed_time(end))

    time()
    return time


def _ratio(one: Callable[[], float], other: Callable[[], float]) -> float:
    rounds = [(one(), other()) for _ in range(_ROUNDS)]
    return statistics.median(a for a, _ in rounds) / statistics.median(b for _, b in rounds)


def _zeros(node: fx.Node) -> torch.Tensor:
    """An input laid out as described; zeros are indices into anything."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()


def _key(module: fx.GraphModule, names: Sequence[str]) -> str:
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {package_version('intarsia')}"]
    lines += names
    for node in module.graph.nodes:
        made = node.meta.get("val")
        values = made if isinstance(made, list | tuple) else [made]
        laid_out = [
            (value.dtype, tuple(value.shape), tuple(value.stride()))
            for value in values
            if isinstance(value, torch.Tensor)
        ]
        lines.append(f"{node.format_node()} {laid_out}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

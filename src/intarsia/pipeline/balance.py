"""Balances: the number of layers in each stage, by the cost, the measured time or the memory of layers.

A layer stashes and pops skips and may return any objects, so it is measured as a whole: not node by node, as
`stages/profile.py` does. Its time is stored on disk by a digest of its code.
"""

from __future__ import annotations

import copy
import hashlib
import io
import marshal
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from intarsia.cache.machine import machine_key
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.logs import counted
from intarsia.pipeline.cost import measure_node
from intarsia.pipeline.gpipe.skip import SkipTracker, use_skip_tracker
from intarsia.pipeline.gpipe.stream import indexed
from intarsia.pipeline.solver import Solution, balance_stages, solve

__all__ = ["Solution", "balance_by_size", "balance_by_time", "balance_cost", "balance_stages"]

Device = torch.device | int | str
Skips = dict[Any, Any]  # the stashed values by namespace and name

_LEAST_RUNS = 3
_MAX_ENTRIES = 20_000  # in the file of times; the oldest are deleted


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """The balance for layers of known cost. It minimizes the cost of the most expensive stage.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    """
    return [len(block) for block in solve(cost, partitions)]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    recompute: bool = True,
    cache: bool = True,
    progress: bool = True,
) -> list[int]:
    """The balance by the measured time of each layer.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> sum(balance_by_time(2, model, torch.rand(8, 4), timeout=0.01, device="cpu", cache=False))
    3

    Args:
        partitions: the number of stages.
        module: the module. Copies of its layers are measured, one at a time.
        sample: an example input. A micro-batch gives better results than a mini-batch.
        timeout: the approximate seconds of measurement, without warm-up.
        device: the device to measure on. By default, the current CUDA device, or the CPU if there is none.
        recompute: whether to add a second forward pass, for checkpointing, to the time of a layer.
        cache: whether to reuse and store the times of equal layers on this machine.
        progress: whether to show a progress bar on a terminal.
    """
    times = profile_times(
        module, sample, timeout, _device(device), recompute=recompute, cache=cache, progress=progress
    )
    return balance_cost(times, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    progress: bool = True,
) -> list[int]:
    """The balance by the memory of each layer in training.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400))
    >>> balance_by_size(2, model, torch.rand(8, 4), device="cpu")
    [1, 1]

    Args:
        partitions: the number of stages.
        module: the module. Copies of its layers run, one at a time.
        input: a mini-batch.
        chunks: the number of micro-batches in the mini-batch.
        param_scale: bytes in training per byte of parameters: 2 to 3 for SGD, 4 to 5 for Adam.
        device: the device to run on. By default, the current CUDA device, or the CPU if there is none.
        progress: whether to show a progress bar on a terminal.
    """
    return balance_cost(
        profile_sizes(module, input, chunks, param_scale, _device(device), progress=progress), partitions
    )


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers, one at a time, on a device and in training mode.

    >>> model = nn.Sequential(nn.Dropout()).eval()
    >>> [layer.training for layer in layerwise_sandbox(model, torch.device("cpu"))], model.training
    ([True], False)
    """
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def _layers(
    module: nn.Sequential, sample: Any, device: torch.device, title: str
) -> Iterator[tuple[nn.Module, Any, Skips]]:
    """Each layer with its input and the skips that reach it; with a `title`, under a progress bar."""
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError(
            "a parameter already has a gradient; profile before the first backward pass, "
            "or after zero_grad(set_to_none=True)"
        )
    value, skips = _detached(sample, device), Skips()
    layers = layerwise_sandbox(module, device)
    for layer in counted(layers, len(module), title) if title else layers:
        yield layer, value, skips
        value, skips = _detached(_run(layer, *_detached((value, skips), copies=True)))


def _run(layer: nn.Module, value: Any, skips: Skips) -> tuple[Any, Skips]:
    """The layer's output, and the skips after it."""
    tracker = SkipTracker(dict(skips))
    with use_skip_tracker(tracker):
        return layer(value), tracker.tensors


def _detached(values: Any, device: torch.device | None = None, *, copies: bool = False) -> Any:
    """The values without a graph; copies are no leaves, so that a layer may change them in place."""

    def detached(tensor: Tensor) -> Tensor:
        own = tensor.detach().to(device or tensor.device).requires_grad_(tensor.requires_grad)
        return own.clone() if copies else own

    return pytree.tree_map_only(Tensor, detached, values)


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
    """The seconds of each layer in a training step on the sample: forward, backward (with the gradient of the
    input) and, with `recompute`, a second forward pass for checkpointing.

    Each layer runs for its share of `timeout`, and at least three times; the least time counts.
    """
    store = JsonStore(cache_path())
    stored: dict[str, Any] = store.read() if cache else {}
    measured: dict[str, float] = {}
    seconds = []
    for layer, value, skips in _layers(module, sample, device, "profiling time" if progress else ""):
        key = layer_key(layer, value, skips, device, f"time recompute={recompute}") if cache else None
        time: Any = measured.get(key or "", stored.get(key or ""))
        if type(time) not in (int, float) or time < 0:
            held = list(layer.parameters())
            run = lambda value, skips, layer=layer: _run(layer, value, skips)  # noqa: E731
            cost = measure_node(run, (value, skips), {}, _LEAST_RUNS, held, timeout / len(module))
            time = (2 if recompute else 1) * cost.forward + cost.backward
            if key is not None:
                measured[key] = time
        seconds.append(float(time))
    if measured:
        store.update(measured, keep=_MAX_ENTRIES)
    return seconds


def profile_sizes(
    module: nn.Sequential,
    input: Any,
    chunks: int,
    param_scale: float,
    device: torch.device,
    *,
    progress: bool = True,
) -> list[int]:
    """The bytes of each layer in training: what one micro-batch keeps alive for the backward pass, and
    `param_scale` times its parameters."""
    if chunks < 1:
        raise ValueError(f"the number of chunks must be positive, got {chunks}")
    batch = next(x for x in pytree.tree_leaves(input) if isinstance(x, Tensor))
    samples = -(-batch.size(0) // chunks)

    def first(tensor: Tensor) -> Tensor:
        part = tensor[:samples] if tensor.dim() else tensor
        return part.detach().requires_grad_(tensor.requires_grad)

    sizes = []
    sample = pytree.tree_map_only(Tensor, first, input)
    for layer, value, skips in _layers(module, sample, device, "profiling memory" if progress else ""):
        parameters = {_address(p): p.untyped_storage().nbytes() for p in layer.parameters()}
        sizes.append(int(live_bytes(layer, value, skips) + param_scale * sum(parameters.values())))
    return sizes


def live_bytes(layer: nn.Module, value: Any, skips: Skips) -> int:
    """Run a layer once and return the bytes in its graph: saved tensors, new leaves, and its outputs.

    Measured, and not on fake tensors as in `stages/profile.py`: a layer may run any code. Every storage
    counts once. Parameters, buffers and the input (an output of the layer before) do not count.
    """
    seen: list[Tensor] = []  # keeps the tensors alive, so that no address is reused

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    inputs = _detached((value, skips), copies=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = _tensors(_run(layer, *inputs))
    alive = [*seen, *outputs, *_leaves(outputs)]
    own = [*layer.parameters(), *layer.buffers(), *_tensors(inputs), *_tensors((value, skips))]
    storages = {_address(x): x.untyped_storage().nbytes() for x in alive}
    return sum(storages[address] for address in storages.keys() - {*map(_address, own)})


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _leaves(outputs: list[Tensor]) -> list[Tensor]:
    """The leaf tensors into which a graph accumulates gradients."""
    leaves, visited = [], set()
    todo: list[Any] = [output.grad_fn for output in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        todo += [following for following, _ in node.next_functions]
    return leaves


def cache_path() -> Path:
    """The file of times: `profiles.json` in the cache directory."""
    return cache_directory() / "profiles.json"


def layer_key(layer: nn.Module, value: Any, skips: Skips, device: torch.device, kind: str) -> str | None:
    """A digest of everything that a layer's time depends on; None if the layer cannot be pickled.

    It covers the layer's attributes, the code of its methods, the forms of tensors (not their values), and
    the machine. A layer of a local class, or with a closure, cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _ContentPickler(buffer, protocol=4).dump((layer, value, skips))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else machine_key()
    modes = torch.__version__, torch.is_autocast_enabled(device.type), torch.get_default_dtype()
    code = [_code_of(type(module)) for module in layer.modules()]
    content = repr((kind, machine, modes, code)).encode() + buffer.getvalue()
    return hashlib.blake2b(content, digest_size=20).hexdigest()


class _ContentPickler(pickle.Pickler):
    """Writes shapes and dtypes in place of tensors."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ("tensor", tuple(value.shape), str(value.dtype), value.stride(), value.requires_grad)
        return None


def _code_of(kind: type[nn.Module]) -> list[tuple[str, bytes]]:
    """The code of the methods of a module class, without those of torch."""
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in ("torch", "builtins")]
    methods = [
        (name, getattr(getattr(member, "__func__", member), "__code__", None))
        for base in bases
        for name, member in sorted(vars(base).items())
    ]
    # Version 2 has no references, which differ from run to run.
    return [(name, marshal.dumps(code, 2)) for name, code in methods if isinstance(code, CodeType)]


def _device(device: Device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return indexed(torch.device(device))

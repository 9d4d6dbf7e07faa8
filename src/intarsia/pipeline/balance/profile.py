"""The cost of each layer: its measured time, or the memory that stays alive for the backward pass.

Layers are not nodes of a graph (`stages/profile.py`). A layer stashes and pops skips and may return any
objects. It is timed as a whole, and its time is stored on disk by a digest of its code.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.cache.machine import machine_key
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.logs import counted
from intarsia.pipeline.gpipe.effects import versions
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip import SkipTracker, use_skip_tracker


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers, one at a time, on a device and in training mode.

    >>> model = nn.Sequential(nn.Dropout()).eval()
    >>> [layer.training for layer in layerwise_sandbox(model, torch.device("cpu"))], model.training
    ([True], False)
    """
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def detach(batch: Batch) -> None:
    """Detach the tensors of a batch; `requires_grad` stays as it is."""
    batch[:] = tuple(_fresh(x) for x in batch)


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class LayerProbe:
    """One layer with the input and the skips that reach it."""

    def __init__(self, layer: nn.Module, batch: Batch, skips: dict[Any, Any]) -> None:
        self.layer = layer
        self.batch = batch
        self.skips = skips
        self.output: Batch | None = None
        self.skips_after: dict[Any, Any] = {}
        # A layer that changes its input in place gets a copy. None: the first run decides.
        self.mutates: bool | None = None

    def inputs(self) -> tuple[Batch, SkipTracker]:
        """A new input and new skips, detached from the layers before."""
        batch, tracker = self.batch.copy(), SkipTracker()
        detach(batch)
        tracker.tensors = {k: _fresh(v) if isinstance(v, Tensor) else v for k, v in self.skips.items()}
        if self.mutates is not False:
            batch[:] = tuple(x.clone() for x in batch)
        return batch, tracker

    def forward(self, batch: Batch, tracker: SkipTracker) -> list[Tensor]:
        """Run once, and return the tensors that receive gradients: outputs and stashed skips."""
        entering = {id(value) for value in tracker.tensors.values()}
        before = versions(batch)
        with use_skip_tracker(tracker):
            self.output = Batch(self.layer(batch.value))
        if self.mutates is None:
            self.mutates = versions(batch) != before
        self.skips_after = tracker.tensors
        stashed = [v for v in tracker.tensors.values() if isinstance(v, Tensor) and id(v) not in entering]
        return [*self.output, *stashed]


def probes(module: nn.Sequential, sample: Any, device: torch.device) -> Iterator[LayerProbe]:
    """Every layer of a module, with the output of the layer before as input.

    Run each layer before you take the next one.
    """
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError(
            "a parameter already has a gradient; profile before the first backward pass, "
            "or after zero_grad(set_to_none=True)"
        )
    batch = Batch(sample)
    batch[:] = tuple(x.detach().to(device).requires_grad_(x.requires_grad) for x in batch)
    skips: dict[Any, Any] = {}
    for layer in layerwise_sandbox(module, device):
        probe = LayerProbe(layer, batch, skips)
        yield probe
        assert probe.output is not None
        batch, skips = probe.output, probe.skips_after
        detach(batch)
        del probe


def live_bytes(probe: LayerProbe, batch: Batch, tracker: SkipTracker) -> int:
    """Run a layer once and return the bytes in its graph: saved tensors, new leaves, and its outputs.

    Every storage counts once. Parameters, buffers and the input (an output of the layer before) do not count.
    """
    seen: list[Tensor] = []  # keeps the tensors alive, so that no address is reused

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    skips = [v for v in tracker.tensors.values() if isinstance(v, Tensor)]
    inputs = [*batch, *probe.batch, *skips]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = probe.forward(batch, tracker)
    alive = [*seen, *outputs, *_leaves(outputs)]
    excluded = {_address(x) for x in (*probe.layer.parameters(), *probe.layer.buffers(), *inputs)}
    storages = {_address(x): x.untyped_storage().nbytes() for x in alive}
    return sum(count for address, count in storages.items() if address not in excluded)


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
    """The seconds of each layer in a training step on the sample: forward, backward (with the gradient of the
    input) and, with `recompute`, a second forward pass for checkpointing.

    Each layer is warmed up, and runs for its share of `timeout`, at least three times; the result is the
    median.
    """
    costs = CostCache(cache)
    seconds = []
    kind = f"time recompute={recompute}"
    layers = probes(module, sample, device)
    for probe in counted(layers, len(module), "profiling time") if progress else layers:
        key = layer_key(probe.layer, probe.batch, probe.skips, device, kind) if cache else None
        cost = costs.get(key)
        if cost is None:
            cost = _measure(probe, timeout / len(module), device, recompute)
            costs.put(key, cost)
        else:
            probe.forward(*probe.inputs())  # the next layer needs its output
        seconds.append(cost)
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
    """The bytes of each layer in training: what one micro-batch keeps alive for the backward pass, and
    `param_scale` times its parameters.

    On a CUDA device, the allocator reports the bytes. On the CPU, they are counted tensor by tensor for 2 and
    3 samples, since every further sample adds the same number of bytes.
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
        probe.forward(*probe.inputs())  # so that workspaces are allocated before
        probe.output = None
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        outputs = probe.forward(batch, tracker)
        torch.cuda.synchronize(device)
        alive.append(torch.cuda.memory_allocated(device) - before)
        del outputs
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


# Measured costs on disk, by a digest of the layer.


# The most costs in the file; the oldest are deleted.
MAX_ENTRIES = 20_000


def cache_path() -> Path:
    """The file of costs: `profiles.json` in the cache directory."""
    return cache_directory() / "profiles.json"


class CostCache:
    """Costs in a JSON file. A disabled cache is empty and stores nothing."""

    def __init__(self, enabled: bool = True) -> None:
        self.store: JsonStore | None = JsonStore(cache_path()) if enabled else None
        self.new_costs: dict[str, float] = {}
        self.costs: dict[str, float] = {} if self.store is None else _costs(self.store.read())

    def get(self, key: str | None) -> float | None:
        """The stored cost, or None."""
        return None if key is None else self.costs.get(key)

    def put(self, key: str | None, cost: float) -> None:
        """Store a cost, if there is a key."""
        if key is not None and self.store is not None:
            self.new_costs[key] = self.costs[key] = cost

    def save(self) -> None:
        """Write the new costs. Costs that another process has written meanwhile stay."""
        if self.store is not None and self.new_costs:
            self.store.update(self.new_costs, keep=MAX_ENTRIES)


def _costs(table: dict[str, Any]) -> dict[str, float]:
    return {key: float(cost) for key, cost in table.items() if type(cost) in (int, float) and cost >= 0}


def layer_key(
    layer: nn.Module, batch: Batch, skips: dict[Any, Any], device: torch.device, kind: str
) -> str | None:
    """A digest of everything that a layer's cost depends on; None if the layer cannot be pickled.

    It covers the layer's attributes, the code of its methods, shapes and dtypes of tensors (not their
    values), and the machine. A layer of a local class, or with a closure, cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _ContentPickler(buffer, protocol=4).dump((layer, batch.value, skips))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    code = [_code_of(type(module)) for module in layer.modules()]
    gradients = [x.requires_grad for x in batch]
    digest = hashlib.blake2b(digest_size=20)
    for part in (kind, _machine(device), code, gradients):
        digest.update(repr(part).encode())
    digest.update(buffer.getvalue())
    return digest.hexdigest()


class _ContentPickler(pickle.Pickler):
    """Writes shapes and dtypes in place of tensors."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ("tensor", tuple(value.shape), str(value.dtype), value.stride(), value.requires_grad)
        return None


def _code_of(cls: type[nn.Module]) -> str:
    """A digest of the code of a module class and its bases; for bases in torch, of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            digest.update(base.__qualname__.encode())
            continue
        for name, member in sorted(vars(base).items()):
            function = getattr(member, "__func__", member)
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                digest.update(name.encode())
                _hash_code(digest, code)
    return digest.hexdigest()


def _hash_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _hash_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def _machine(device: torch.device) -> tuple[Any, ...]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine_key()
    return name, torch.__version__, torch.is_autocast_enabled(device.type), torch.get_default_dtype()

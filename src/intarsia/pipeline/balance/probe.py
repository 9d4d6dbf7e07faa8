"""A layer in a sandbox: run alone, as often as needed, without any effect on the model it comes from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.pipeline.gpipe.effects import versions
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip.tracker import SkipTracker, use_skip_tracker


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers, one at a time, on a device and in training mode.

    >>> model = nn.Sequential(nn.Dropout()).eval()
    >>> [layer.training for layer in layerwise_sandbox(model, torch.device("cpu"))], model.training
    ([True], False)
    """
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def detach(batch: Batch) -> None:
    """Cut a batch off its graph; what needed a gradient still needs it."""
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
        # A layer that changes its input in place gets a copy; the first run finds out.
        self.mutates: bool | None = None

    def inputs(self) -> tuple[Batch, SkipTracker]:
        """A fresh input and fresh skips, cut off from what came before."""
        batch, tracker = self.batch.copy(), SkipTracker()
        detach(batch)
        tracker.tensors = {k: _fresh(v) if isinstance(v, Tensor) else v for k, v in self.skips.items()}
        if self.mutates is not False:
            batch[:] = tuple(x.clone() for x in batch)
        return batch, tracker

    def forward(self, batch: Batch, tracker: SkipTracker) -> list[Tensor]:
        """Run once; what is returned, stashed skips included, is where gradients will come in."""
        given = {id(value) for value in tracker.tensors.values()}
        before = versions(batch)
        with use_skip_tracker(tracker):
            self.output = Batch(self.layer(batch.value))
        if self.mutates is None:
            self.mutates = versions(batch) != before
        self.skips_after = tracker.tensors
        stashed = [v for v in tracker.tensors.values() if isinstance(v, Tensor) and id(v) not in given]
        return [*self.output, *stashed]


def probes(module: nn.Sequential, sample: Any, device: torch.device) -> Iterator[LayerProbe]:
    """Every layer of a module in turn, each fed by the one before; each must be run before the next comes."""
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError(
            "some parameter already has a gradient; profile before the first backward, "
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
    """Run a layer once and count what its graph holds: saved tensors, leaves it made, and its outputs.

    Every storage counts once; parameters, buffers and the input (an output of the layer before) do not.
    """
    seen: list[Tensor] = []  # held, so that no address is used twice

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
    """The leaf tensors a graph accumulates gradients into."""
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

"""The bytes a layer leaves alive between its forward and its backward pass, counted without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intarsia.pipeline.balance.probe import LayerProbe
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip.tracker import SkipTracker


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

"""Batch norm in the graph of a stage, with running statistics of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from intarsia.errors import PartitionError
from intarsia.pipeline.gpipe.batchnorm import DeferredBatchNorm
from intarsia.pipeline.gpipe.checkpoint import is_recomputing
from intarsia.pipeline.stages.stage import Stage

_BATCH_NORM, _COUNT = torch.ops.aten.batch_norm.default, torch.ops.aten.add_.Tensor


class DeferredNode(nn.Module):
    """Replaces `aten.batch_norm` in training in a graph."""

    def __init__(self, momentum: float, eps: float) -> None:
        super().__init__()
        self.norm: DeferredBatchNorm = DeferredBatchNorm(1, eps, momentum, affine=False)

    def begin(self, chunks: int) -> None:
        """Start a batch of `chunks` micro-batches."""
        self.norm.begin(chunks)

    def forward(self, input: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor) -> Tensor:
        """The result of batch norm; the last micro-batch updates the statistics."""
        # The stage owns the states and passes them in every call, since they may move to another device.
        self.norm._parameters.update(weight=weight, bias=bias)
        self.norm._buffers.update(running_mean=mean, running_var=variance)
        normalized: Tensor = self.norm(input)
        return normalized


class DeferredCount(nn.Module):
    """Replaces the counter of batches in a graph, which may be in another stage than the statistics."""

    counted: bool = False

    def begin(self, chunks: int) -> None:
        """Start a batch."""
        self.counted = False

    def forward(self, batches: Tensor) -> Tensor:
        """Count the batch once."""
        if not self.counted and not is_recomputing():
            self.counted = True
            batches.add_(1)
        return batches


class _Deferring(fx.GraphModule):
    """A stage's program with deferred nodes."""


def defer_statistics(stages: Iterable[nn.Module], deferred: bool) -> list[DeferredNode | DeferredCount]:
    """Set whether the batch norms of stages update their running statistics once per batch (`deferred`).

    Returns the deferred modules, whose `begin` starts a batch. Each micro-batch is normalized by its own
    statistics in both cases.
    """
    norms: list[DeferredNode | DeferredCount] = []
    for stage in stages:
        if isinstance(stage, Stage) and isinstance(stage.runner, _Deferring):
            object.__setattr__(stage, "runner", stage.program)
        if not deferred:
            continue
        if not isinstance(stage, Stage):
            raise PartitionError(
                "deferred_batch_norm=True works in stages cut by the graph; these stages are cut along"
                " modules: call DeferredBatchNorm.convert_deferred_batch_norm(model) before split"
            )
        if stage.runner is not stage.program:
            raise PartitionError(
                "deferred_batch_norm=True cannot be combined with modules that are recomputed by name; with"
                " checkpoint=True or numbers of stages, whole stages are recomputed"
            )
        if stage.training:
            norms += _defer(stage)
    return norms


def _defer(stage: Stage) -> list[DeferredNode | DeferredCount]:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in stage.program.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    program = _Deferring(stage.program, graph)
    form = stage.form
    placeholders = graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, form.arguments, strict=True)
    states = {node: form.states[name] for node, name in pairs if name in form.states}
    norms: list[DeferredNode | DeferredCount] = []
    for node in list(graph.nodes):
        state = states.get(node.args[3 if node.target is _BATCH_NORM else 0]) if node.args else None
        if node.target is _BATCH_NORM and node.args[5] and state is not None:
            deferred: DeferredNode | DeferredCount = DeferredNode(*node.args[6:8])
            arguments = node.args[:5]
        elif node.target is _COUNT and state is not None and state.endswith("num_batches_tracked"):
            deferred, arguments = DeferredCount(), node.args[:1]
        else:
            continue
        name = f"deferred_{node.name}"
        program.add_module(name, deferred)
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_module(name, arguments))
        graph.erase_node(node)
        norms.append(deferred)
    if norms:
        program.recompile()
        object.__setattr__(stage, "runner", program)
    return norms

"""Checkpointing in two nodes, so that the recomputation can start before the gradient has arrived.

`torch.utils.checkpoint`, by which modules named in `split` and stages over processes are recomputed
(`stages/program.py`), has one node: it starts when the gradient arrives, on autograd's thread.

x ──Checkpoint──> y ──────────join──> y'       forward: the function runs without a graph
                  └─fork─Recompute─┘           backward: Recompute runs it again, with a graph;
                                               Checkpoint then sends the gradient through it
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.stream import fork, get_phony, join
from intarsia.pipeline.gpipe.worker import BackwardTask, Gradients, ThreadState


class Repeatable(Protocol):
    """A function that can run a second time with the same result."""

    def __call__(self, value: Any) -> Any:
        """Run the function."""

    def record(self) -> AbstractContextManager[None]:
        """The context of the first run."""

    def replay(self) -> AbstractContextManager[None]:
        """The context of the second run."""

    def backward(self) -> AbstractContextManager[None]:
        """The context of a backward pass that other threads run beside."""


class _Phase(threading.local):
    checkpointing = False
    recomputing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether the module now runs forward under checkpointing: it will run again for the gradient.

    >>> is_checkpointing()
    False
    """
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether the module now runs again for the gradient. For example, a counter must not count this run.

    >>> is_recomputing()
    False
    """
    return _phase.recomputing


@contextmanager
def enable_checkpointing() -> Iterator[None]:
    """Make `is_checkpointing()` true."""
    before, _phase.checkpointing = _phase.checkpointing, True
    try:
        yield
    finally:
        _phase.checkpointing = before


@contextmanager
def enable_recomputing() -> Iterator[None]:
    """Make `is_recomputing()` true."""
    before, _phase.recomputing = _phase.recomputing, True
    try:
        yield
    finally:
        _phase.recomputing = before


@dataclass
class _Shared:
    """The state that the nodes of one run of a function share."""

    function: Repeatable
    input: Batch  # the structure of the input, without its tensors
    state: ThreadState
    backward_task: BackwardTask | None
    keeps: bool = False  # whether the graph of the first run is saved
    output: Batch | None = None
    # The input and the output of the function, with the graph between them.
    graphs: deque[tuple[Batch, Batch]] = field(default_factory=deque)

    def run(self, inputs: tuple[Tensor, ...]) -> tuple[Batch, Batch]:
        """Run the function in a graph of its own that begins at its inputs."""
        batch = self.input.copy()
        batch[:] = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        return batch, batch.call(self.function)

    def run_again(self, inputs: tuple[Tensor, ...]) -> None:
        """Run the function a second time, with the same result."""
        with self.state.enter(), torch.enable_grad(), enable_recomputing(), self.function.replay():
            self.graphs.append(self.run(inputs))


class Checkpointing:
    """The nodes of one run: `checkpoint` computes, `recompute` attaches the second node to the result.

    `keep` runs without checkpointing. With a `backward_task`, the backward pass runs on the stage's thread.
    """

    def __init__(
        self,
        function: Repeatable,
        batch: Batch,
        backward_task: BackwardTask | None = None,
        phony: Tensor | None = None,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self.batch = batch
        structure = batch.copy()
        structure[:] = tuple(get_phony(x.device, requires_grad=False) for x in batch)
        self.shared: _Shared = _Shared(function, structure, ThreadState.capture(), backward_task)
        # If only parameters need gradients, the node needs another input with requires_grad: the phony.
        self.phony: Tensor = get_phony(batch[0].device, requires_grad=True) if phony is None else phony
        self.tie: Tensor | None = tie_parameters(parameters, batch[0].device)

    def checkpoint(self) -> Batch:
        """Run the function under checkpointing."""
        return self._apply(Checkpoint)

    def keep(self) -> Batch:
        """Run the function and save its graph, for the stage's backward thread."""
        return self._apply(Keep)

    def _apply(self, node: type[torch.autograd.Function]) -> Batch:
        tensors = node.apply(self.phony, self.tie, self.shared, *self.batch)  # type: ignore[no-untyped-call]
        output = self.shared.output
        assert output is not None
        self.shared.output = None  # the node must not keep its own output alive
        output[:] = tensors
        return output

    def recompute(self, batch: Batch) -> None:
        """Make the function run again before the gradient of this batch is used."""
        position = batch.carrier
        if position is None:
            return
        batch[position], phony = fork(batch[position])
        if not phony.requires_grad:  # there will be no backward pass
            return
        phony = Recompute.apply(phony, self.shared, *self.batch)  # type: ignore[no-untyped-call]
        batch[position] = join(batch[position], phony)


def _differentiate(
    graph: tuple[Batch, Batch], grads: Gradients, *, accumulate: bool, retain: bool = False
) -> Gradients:
    """The gradients of the inputs of a graph. With `accumulate`, those of parameters are accumulated too."""
    inputs, output = graph
    pairs = [(y, g) for y, g in zip(output, grads, strict=True) if y.requires_grad and g is not None]
    if not pairs:
        return tuple(None for _ in inputs)
    outputs, gradients = zip(*pairs, strict=True)
    sources = [x for x in inputs if x.requires_grad]
    with torch.enable_grad():
        if not accumulate:
            options = {"retain_graph": retain, "allow_unused": True}
            results = iter(torch.autograd.grad(outputs, sources, gradients, **options) if sources else ())
            return tuple(next(results) if x.requires_grad else None for x in inputs)
        torch.autograd.backward(outputs, gradients, retain_graph=retain)
    accumulated = tuple(x.grad for x in inputs)
    for x in inputs:
        x.grad = None  # a retained graph may run again
    return accumulated


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "gradients of gradients need checkpoint='never': a checkpoint has first order only"
        )


class TieParameters(torch.autograd.Function):
    """An edge of the graph from a stage's node to its parameters.

    A stage accumulates the gradients of its parameters in a backward pass of its own, which is right only
    for a plain `backward()`. Through this edge, a pass for some parameters reaches the stage and is refused.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        ctx.set_materialize_grads(False)
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not accumulates_everywhere():
            raise RuntimeError(
                "torch.autograd.grad and backward(inputs=...) of parameters need checkpoint='never' and"
                " concurrent_backward=False"
            )
        return None, *(None for _ in range(ctx.count))


def tie_parameters(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """A phony that depends on the parameters."""
    trained = [p for p in parameters if p.requires_grad]
    tied: Tensor = TieParameters.apply(get_phony(device, requires_grad=False), *trained)  # type: ignore[no-untyped-call]
    return tied


def accumulates_everywhere() -> bool:
    """Whether the backward pass that runs now is a plain `backward()`, not `grad()` and without `inputs`."""
    # torch has only a private function for this. Without it, `grad()` would also accumulate.
    is_plain = getattr(torch.autograd, "_is_checkpoint_valid", None)
    return True if is_plain is None else bool(is_plain())


def refuse_parameter_hooks(parameters: Iterable[Tensor]) -> None:
    """Raise for hooks that would get the gradient of each micro-batch instead of the mini-batch's."""
    for parameter in parameters:
        # torch has no public function for this.
        hooks = (getattr(parameter, n, None) for n in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        if any(hooks):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, which would be called for every"
                " micro-batch: hooks on parameters need checkpoint='never' and concurrent_backward=False"
            )


class StageNode(torch.autograd.Function):
    """A run of a function as one node. The backward pass goes through a graph of its own."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_order()
        shared: _Shared = ctx.shared
        saved = ctx.saved_tensors
        accumulate, retain = accumulates_everywhere(), shared.keeps and retains_graph()

        def backward(grads: Gradients) -> Gradients:
            if not shared.graphs:  # the loss does not use the output that Recompute is attached to
                shared.run_again(saved)
            graph = shared.graphs[0] if retain else shared.graphs.pop()
            with nullcontext() if shared.backward_task is None else shared.function.backward():
                return _differentiate(graph, grads, accumulate=accumulate, retain=retain)

        if shared.backward_task is None:
            return None, None, None, *backward(grads)
        return None, None, None, *shared.backward_task.submit_backward(grads, backward, saved)


class Checkpoint(StageNode):
    """Forward without a graph; backward through the recomputed one."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, tie: Tensor, shared: _Shared, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        with torch.no_grad(), enable_checkpointing(), shared.function.record():
            output = Batch(shared.function(shared.input.rebuild(inputs)))
        shared.output = output
        # autograd.Function must not return the same tensor twice, nor an input.
        return tuple(x.detach() for x in output)


class Keep(StageNode):
    """Forward in a graph that is saved; backward through it, on the stage's thread."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, tie: Tensor, shared: _Shared, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        shared.keeps = True
        with torch.enable_grad(), shared.function.record():
            graph = shared.run(inputs)
        shared.graphs.append(graph)
        shared.output = graph[1].copy()
        return tuple(x.detach() for x in graph[1])


class Recompute(torch.autograd.Function):
    """Forward: an empty tensor. Backward: runs the checkpointed function again, with a graph."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, shared: _Shared, *inputs: Tensor) -> Tensor:
        ctx.shared = shared
        ctx.save_for_backward(*inputs)
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _refuse_second_order()
        shared: _Shared = ctx.shared
        saved = ctx.saved_tensors
        if shared.backward_task is None:
            shared.run_again(saved)
        else:
            shared.backward_task.submit_recompute(lambda: shared.run_again(saved))
        return None, None, *(None for _ in saved)


def retains_graph() -> bool:
    """Whether the backward pass that runs now retains the graph."""
    # torch has only a private function for this. Without it, graphs stay until their outputs are deleted.
    retains = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if retains is None else bool(retains())

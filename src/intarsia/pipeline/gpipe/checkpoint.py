"""Checkpointing in two nodes, so that the recomputation can start before the gradient has arrived.

x ──Checkpoint──> y ──────────join──> y'       forward: the function runs without a graph
                  └─fork─Recompute─┘           backward: Recompute runs it again, with a graph;
                                               Checkpoint then sends the gradient through it
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from intarsia.pipeline.gpipe.backward_threads import BackwardTask, Gradients, placeholder_gradient
from intarsia.pipeline.gpipe.dependency import fork, get_phony, join
from intarsia.pipeline.gpipe.generators import borrowed_generators, default_generator
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.worker import ThreadState

Function = Callable[[Any], Any]


class Replay(Protocol):
    """What a second run of a function needs to be the same as the first."""

    def record(self) -> AbstractContextManager[None]:
        """Entered around the first run."""

    def replay(self) -> AbstractContextManager[None]:
        """Entered around the second."""

    def backward(self) -> AbstractContextManager[None]:
        """Entered around the backward pass, where other threads run at the same time."""


class ReplayRandom:
    """The second run draws the random numbers of the first."""

    def __init__(self, device: torch.device) -> None:
        self.devices: list[Any] = sorted({torch.device("cpu"), device}, key=str)
        self.states: list[Tensor] = []

    def record(self) -> AbstractContextManager[None]:
        """Note where the generators stand."""
        self.states = [default_generator(device).get_state() for device in self.devices]
        return nullcontext()

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw from there again."""
        with borrowed_generators(self.devices) as generators:
            for generator, state in zip(generators, self.states, strict=True):
                generator.set_state(state)
            yield

    def backward(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


class _Phase(threading.local):
    checkpointing = False
    recomputing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether the module now runs forward under checkpointing: it will run once more, for the gradient.

    >>> is_checkpointing()
    False
    """
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether the module now runs again for the gradient; a counter, say, must not count this time.

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
    """What the nodes of one run of a function share."""

    function: Function
    input: Batch  # the structure of the input, without its tensors
    replay: Replay
    state: ThreadState
    backward_task: BackwardTask | None
    output: Batch | None = None
    # The input and the output of the function, with the graph between them.
    graphs: deque[tuple[Batch, Batch]] = field(default_factory=deque)

    def run(self, inputs: tuple[Tensor, ...]) -> tuple[Batch, Batch]:
        """Run the function with a graph of its own, that begins at its inputs."""
        batch = self.input.copy()
        batch[:] = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        return batch, batch.call(self.function)

    def run_again(self, inputs: tuple[Tensor, ...]) -> None:
        """Run the function once more, as it ran the first time."""
        with self.state.enter(), torch.enable_grad(), enable_recomputing(), self.replay.replay():
            self.graphs.append(self.run(inputs))


def checkpoint(function: Function, input: Any) -> Any:
    """Run a function without keeping what its backward needs; that is computed again when it is needed.

    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(lambda x: x.exp().sum(), x).backward()
    >>> torch.equal(x.grad, x.exp())
    True
    """
    checkpointing = Checkpointing(function, Batch(input))
    batch = checkpointing.checkpoint()
    checkpointing.recompute(batch)
    return batch.value


class Checkpointing:
    """Makes the nodes of one run: `checkpoint` computes, `recompute` puts the second node on the result.

    With a `backward_task` the backward pass runs on the stage's thread; `keep` runs without checkpointing.
    """

    def __init__(
        self,
        function: Function,
        batch: Batch,
        replay: Replay | None = None,
        backward_task: BackwardTask | None = None,
        phony: Tensor | None = None,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self.batch = batch
        structure = batch.copy()
        structure[:] = tuple(get_phony(x.device, requires_grad=False) for x in batch)
        replay = replay or ReplayRandom(batch[0].device)
        self.shared: _Shared = _Shared(function, structure, replay, ThreadState.capture(), backward_task)
        # The input may need no gradient while the parameters do, so a phony that needs one comes along.
        self.phony: Tensor = get_phony(batch[0].device, requires_grad=True) if phony is None else phony
        self.tie: Tensor | None = tie_parameters(parameters, batch[0].device)

    def checkpoint(self) -> Batch:
        """Run the function under checkpointing."""
        return self._apply(Checkpoint)

    def keep(self) -> Batch:
        """Run the function and keep its graph, for the stage's backward thread."""
        return self._apply(Keep)

    def _apply(self, node: type[torch.autograd.Function]) -> Batch:
        tensors = node.apply(self.phony, self.tie, self.shared, *self.batch)  # type: ignore[no-untyped-call]
        output = self.shared.output
        assert output is not None
        self.shared.output = None  # the node must not keep its own output alive
        output[:] = tensors
        return output

    def recompute(self, batch: Batch) -> None:
        """Let the function run again before the gradient of this batch goes on."""
        position = batch.carrier
        if position is None:
            return
        batch[position], phony = fork(batch[position])
        if not phony.requires_grad:  # nothing in this batch has a gradient, so there will be no backward pass
            return
        phony = Recompute.apply(phony, self.shared, *self.batch)  # type: ignore[no-untyped-call]
        batch[position] = join(batch[position], phony)


def _differentiate(
    graph: tuple[Batch, Batch], grads: Gradients, *, accumulate: bool, retain: bool = False
) -> Gradients:
    """Send gradients through a graph; the input's are returned, those of parameters accumulated if asked."""
    inputs, output = graph
    pairs = [(y, g) for y, g in zip(output, grads, strict=True) if y.requires_grad and g is not None]
    if not pairs:
        return tuple(None for _ in inputs)
    outputs, gradients = zip(*pairs, strict=True)
    wanted = [x for x in inputs if x.requires_grad]
    with torch.enable_grad():
        if not accumulate:
            asked = {"retain_graph": retain, "allow_unused": True}
            results = iter(torch.autograd.grad(outputs, wanted, gradients, **asked) if wanted else ())
            return tuple(next(results) if x.requires_grad else None for x in inputs)
        torch.autograd.backward(outputs, gradients, retain_graph=retain)
    accumulated = tuple(x.grad for x in inputs)
    for x in inputs:
        x.grad = None  # a retained graph may be walked again
    return accumulated


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("gradients of gradients need checkpoint='never'; a checkpoint has no second order")


class TieParameters(torch.autograd.Function):
    """An edge from a stage's node to its parameters, so that a pass that asks for them finds the stage.

    The stage gives them their gradients itself, in a backward pass of its own; that is right for a plain
    `backward()` alone, so a pass that asks for some of them is refused.
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
    """A phony that leads to the parameters."""
    trained = [p for p in parameters if p.requires_grad]
    tied: Tensor = TieParameters.apply(get_phony(device, requires_grad=False), *trained)  # type: ignore[no-untyped-call]
    return tied


def accumulates_everywhere() -> bool:
    """Whether the backward pass that runs now is a plain `backward()`, not `grad()` and without `inputs`."""
    # only a private function of torch knows; a release without this would accumulate where it should not.
    ask = getattr(torch.autograd, "_is_checkpoint_valid", None)
    return True if ask is None else bool(ask())


def refuse_parameter_hooks(parameters: Iterable[Tensor]) -> None:
    """Refuse hooks that would see the gradient of each micro-batch instead of the mini-batch's."""
    for parameter in parameters:
        # torch has no public way to ask.
        hooks = (getattr(parameter, n, None) for n in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        if any(hooks):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, which would be called for every"
                " micro-batch: hooks on parameters need checkpoint='never' and concurrent_backward=False"
            )


class Checkpoint(torch.autograd.Function):
    """Forward without a graph; backward through the recomputed one."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, tie: Tensor, shared: _Shared, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        with torch.no_grad(), enable_checkpointing(), shared.replay.record():
            output = Batch(shared.function(shared.input.rebuild(inputs)))
        shared.output = output
        # The same tensor twice, or an input handed on, would confuse autograd's bookkeeping.
        return tuple(x.detach() for x in output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_order()
        shared: _Shared = ctx.shared
        saved = ctx.saved_tensors
        accumulate = accumulates_everywhere()

        def backward(arrived: Gradients) -> Gradients:
            if not shared.graphs:  # the loss left out the output that Recompute hangs on
                shared.run_again(saved)
            with nullcontext() if shared.backward_task is None else shared.replay.backward():
                return _differentiate(shared.graphs.pop(), arrived, accumulate=accumulate)

        if shared.backward_task is None:
            return None, None, None, *backward(grads)
        shared.backward_task.submit_backward(grads, backward)
        return None, None, None, *(placeholder_gradient(x) if x.requires_grad else None for x in saved)


class Recompute(torch.autograd.Function):
    """Forward nothing; backward runs the checkpointed function again, with a graph."""

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


class Keep(torch.autograd.Function):
    """Forward with a graph of its own, kept; backward through it, on the stage's thread."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, tie: Tensor, shared: _Shared, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        with torch.enable_grad(), shared.replay.record():
            graph = shared.run(inputs)
        shared.graphs.append(graph)
        shared.output = graph[1].copy()
        return tuple(x.detach() for x in graph[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_order()
        shared: _Shared = ctx.shared
        saved = ctx.saved_tensors
        assert shared.backward_task is not None
        retain = graph_is_kept()
        graph = shared.graphs[0] if retain else shared.graphs.pop()
        accumulate = accumulates_everywhere()

        def backward(arrived: Gradients) -> Gradients:
            with shared.replay.backward():
                return _differentiate(graph, arrived, accumulate=accumulate, retain=retain)

        shared.backward_task.submit_backward(grads, backward)
        return None, None, None, *(placeholder_gradient(x) if x.requires_grad else None for x in saved)


def graph_is_kept() -> bool:
    """Whether the running backward pass retains the graph."""
    # only a private function of torch knows; a release without this would keep graphs until they are dropped.
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())

"""What each node of a graph costs: measured seconds forward and backward, and bytes kept for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from intarsia.graph.nodes import is_compute
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.stages.devices import META, on_device, to_meta
from intarsia.pipeline.stages.step_cost import costs_in_step, synchronized
from intarsia.pipeline.stages.trace import Trace

Measure = Callable[[Callable[..., Any], Any, Any, int], Cost]
"""The cost of one node, from its target, arguments and keyword arguments, and how often to repeat it."""

_PASSES = 2  # over the graph, each node timed in both


def profile(
    trace: Trace,
    tensors: Sequence[torch.Tensor],
    *,
    repeats: int = 2,
    progress: Callable[[int, int], None] | None = None,
    measure: Measure | None = None,
) -> list[Cost]:
    """Measure every node at the given inputs; of equal nodes one in each pass.

    Each node runs alone, once to warm up and then `repeats` times, forward and backward; the least time
    counts, of two passes over the graph: what disturbs the machine for a moment meets a node only once.
    Then the graph runs as a step runs it, and nodes are given their part of what that takes more.
    The model's buffers and the random state are as before when it returns. `measure` takes the place of the
    stopwatch: the graph then runs on the meta device, for its shapes alone.
    """
    runner = _Profiler(trace, repeats, _PASSES * len(trace.line.nodes), progress, measure)
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        for _ in range(_PASSES):
            runner.known.clear()
            given = _placeholders(trace, tensors)
            runner.run(*(given if measure is None else to_meta(given)))
        saved, weights = saved_bytes(trace), weight_bytes(trace)
        none = Cost()
        costs = [
            Cost(c.forward, c.backward_input, c.backward_weight, saved[i], weights[i])
            for i, c in enumerate(runner.costs.get(n, none) for n in trace.line.nodes)
        ]
        return costs if measure is not None else costs_in_step(trace, tensors, costs, repeats)


def saved_bytes(trace: Trace) -> list[int]:
    """The bytes each node makes autograd keep, read from the graph alone: nothing is allocated.

    A tensor that two nodes keep is counted where it is first kept; parameters are not counted.
    """
    runner = _Saver(trace)
    # Fake tensors of the example's own lengths: the capture's open lengths must not be narrowed by this run.
    with FakeTensorMode() as mode, torch.enable_grad():
        runner.run(*trace.fakes(mode, trace.signature.example))
    return [runner.kept.get(n, 0) for n in trace.line.nodes]


def weight_bytes(trace: Trace) -> list[int]:
    """The bytes of the states each node is the first to read."""
    out, seen = [0] * len(trace.line.nodes), set()
    for i, node in enumerate(trace.line.nodes):
        for value in node.all_input_nodes:
            state = trace.states.get(value)
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                out[i] += state.bytes
    return out


class _Profiler(fx.Interpreter):
    """Runs the graph node by node on real tensors and times each."""

    def __init__(
        self,
        trace: Trace,
        repeats: int,
        count: int,
        progress: Callable[[int, int], None] | None,
        measure: Measure | None,
    ) -> None:
        super().__init__(trace.module, graph=trace.graph)
        self.measure = measure
        self.repeats, self.count, self.progress = repeats, count, progress
        self.costs: dict[fx.Node, Cost] = {}
        self.known: dict[Any, Cost] = {}
        self.done = 0

    def run_node(self, n: fx.Node) -> Any:
        if not is_compute(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if self.measure is not None:
            args, kwargs = on_device((args, kwargs), META)
        key = _key(n, args, kwargs)
        cost = self.known.get(key) if key is not None else None
        if cost is None:
            cost = (self.measure or measure_node)(n.target, args, kwargs, self.repeats)  # type: ignore[arg-type]
            if key is not None:
                self.known[key] = cost
        self.costs[n] = cost if n not in self.costs else _least(cost, self.costs[n])
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.count)
        grows = any(
            isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves((args, kwargs))
        )
        with torch.no_grad():
            value = n.target(*args, **kwargs)  # type: ignore[operator]
        return pytree.tree_map_only(
            torch.Tensor, lambda v: v.detach().requires_grad_(grows and v.is_floating_point()), value
        )


def _least(a: Cost, b: Cost) -> Cost:
    return Cost(
        min(a.forward, b.forward),
        min(a.backward_input, b.backward_input),
        min(a.backward_weight, b.backward_weight),
    )


def measure_node(target: Callable[..., Any], args: Any, kwargs: Any, repeats: int) -> Cost:
    """Time one node alone, forward and backward, on copies of its inputs.

    The gradient of a weight is added to that of the micro-batches before, which counts too.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    grown = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    weights = {i for i in grown if isinstance(leaves[i], torch.nn.Parameter)}
    forward, inputs, whole, added = [], [], [], []
    for _ in range(repeats + 1):
        # Copies, so that a node that works in place finds the same values each time.
        fresh = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        for i in grown:
            fresh[i].requires_grad_(isinstance(leaves[i], torch.nn.Parameter) or leaves[i].requires_grad)
        wanted = [i for i in grown if fresh[i].requires_grad]
        # A leaf may not be changed in place; what autograd sees is one step behind it.
        seen = [v.clone() if i in wanted and i not in weights else v for i, v in enumerate(fresh)]
        again, options = pytree.tree_unflatten(seen, spec)
        begin = synchronized(fresh)
        with torch.enable_grad():
            value = target(*again, **options)
        forward.append(synchronized(fresh) - begin)
        roots = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor) and v.requires_grad]
        if roots and wanted:
            grads = [torch.ones_like(r) for r in roots]
            inputs.append(_time_grad(roots, [fresh[i] for i in wanted if i not in weights], grads))
            whole.append(_time_grad(roots, [fresh[i] for i in wanted], grads))
            added.append(_time_adding([fresh[i] for i in wanted if i in weights]))
    through = min(inputs[1:], default=0.0)
    of_weights = max(0.0, min(whole[1:], default=0.0) - through) + min(added[1:], default=0.0)
    return Cost(min(forward[1:]), through, of_weights)


def _time_grad(roots: list[torch.Tensor], leaves: list[torch.Tensor], grads: list[torch.Tensor]) -> float:
    if not leaves:
        return 0.0
    begin = synchronized(leaves)
    torch.autograd.grad(roots, leaves, grads, retain_graph=True, allow_unused=True)
    return synchronized(leaves) - begin


def _time_adding(weights: list[torch.Tensor]) -> float:
    sums = [torch.zeros_like(weight) for weight in weights]
    begin = synchronized(weights)
    for total, weight in zip(sums, weights, strict=True):
        total.add_(weight.detach())
    return synchronized(weights) - begin


class _Saver(fx.Interpreter):
    """Runs the graph on fake tensors and notes what autograd keeps at each node."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.module, graph=trace.graph)
        self.trace = trace
        self.kept: dict[fx.Node, int] = {}
        self.seen: set[Any] = set()
        self.held: list[torch.Tensor] = []

    def run(self, *args: Any, **options: Any) -> Any:
        # Weights are there anyway: keeping one costs nothing.
        holders = [n for n in self.trace.graph.nodes if n.op == "placeholder"]
        given = list(args)
        for i, (node, value) in enumerate(zip(holders, args, strict=True)):
            if node in self.trace.states:
                given[i] = value.detach().requires_grad_(self.trace.states[node].tensor.requires_grad)
                self.seen.add(_storage(given[i]))
        return super().run(*given, **options)

    def run_node(self, n: fx.Node) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = _storage(tensor)
            if key not in self.seen:
                self.seen.add(key)
                self.held.append(tensor)  # alive, so that its storage is not mistaken for another
                self.kept[n] = self.kept.get(n, 0) + tensor.numel() * tensor.element_size()
            return tensor

        with saved_tensors_hooks(pack, lambda t: t):
            return super().run_node(n)


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _key(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    parts = tuple(
        (tuple(v.shape), v.dtype, v.stride(), isinstance(v, torch.nn.Parameter), v.requires_grad)
        if isinstance(v, torch.Tensor)
        else repr(v)
        for v in leaves
    )
    return node.target, spec, parts


def _placeholders(trace: Trace, tensors: Sequence[torch.Tensor]) -> list[Any]:
    inputs = dict(zip(trace.inputs, tensors, strict=True))
    out: list[Any] = []
    for node in trace.graph.nodes:
        if node.op != "placeholder":
            continue
        if node in trace.states:
            tensor = trace.states[node].tensor
            out.append(tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone())
        else:
            out.append(inputs.get(node))
    return out

"""The cost of each node of a graph: seconds forward and backward, and bytes saved for backward.

A `CostSource` provides the seconds. Nodes are measured on the model's own values, or on random values if the
model has no memory, or their times are computed for a described device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from intarsia.errors import PartitionError
from intarsia.graph.nodes import is_compute
from intarsia.logs import tell_share, working
from intarsia.pipeline.cost import Cost, measure_node
from intarsia.pipeline.stages.program import META, on_device, to_meta
from intarsia.pipeline.stages.stopwatch import costs_in_step, measure_apart, share_apart
from intarsia.pipeline.stages.trace import Trace

Progress = Callable[[int, int], None]
_PASSES = 2  # passes over the graph; each times every node


class CostSource(Protocol):
    """A source of the seconds of nodes. `str` describes it in reports."""

    real: bool  # whether it uses the model's values; if not, the graph runs on the meta device

    def cost(self, target: Callable[..., Any], args: Any, kwargs: Any, repeats: int, apart: bool) -> Cost:
        """The cost of one node, from its target and arguments. `apart` also sets `Cost.apart`."""
        ...


class Measured:
    """Measures nodes on the model's own values."""

    real = True

    def cost(self, target: Callable[..., Any], args: Any, kwargs: Any, repeats: int, apart: bool) -> Cost:
        """The least of `repeats` runs. `Cost.apart` is measured later, on the whole graph."""
        return measure_node(target, args, kwargs, repeats)

    def __str__(self) -> str:
        return ""


class RandomValues:
    """Measures each node on random values, whose memory is then freed.

    Floats are between 0 and 1. Integers are zero, which is a valid index of any table.
    """

    real = False

    def __init__(self) -> None:
        device = torch.get_default_device()
        self.device: torch.device = torch.device("cpu") if device.type == "meta" else device

    def cost(self, target: Callable[..., Any], args: Any, kwargs: Any, repeats: int, apart: bool) -> Cost:
        """The least of `repeats` runs."""
        values = pytree.tree_map_only(Tensor, lambda t: _random(t, self.device), (args, kwargs))
        try:
            arguments, options = on_device(values, self.device)
            cost = measure_node(target, arguments, options, repeats)
            return replace(cost, apart=measure_apart(target, arguments, options, repeats)) if apart else cost
        except Exception as error:
            raise PartitionError(
                f"{target} cannot be measured on random values ({error}); costs='analytic' computes them"
                " instead"
            ) from error

    def __str__(self) -> str:
        return f"each node measured on {self.device} with random values"


@dataclass(frozen=True)
class DeviceSpeed:
    """Operations and bytes per second of a device, for computed costs. Only the ratio changes the balance."""

    flops: float = 1e12
    bytes: float = 1e11
    real = False

    def __str__(self) -> str:
        return f"computed for {self.flops / 1e12:g} TFLOP/s and {self.bytes / 1e9:g} GB/s"

    def cost(self, target: Callable[..., Any], args: Any, kwargs: Any, repeats: int, apart: bool) -> Cost:
        """The cost from the floating-point operations, by torch's counter, and the bytes read and written."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        fresh = [_leaf(v) if isinstance(v, Tensor) else v for v in leaves]
        again, options = on_device(pytree.tree_unflatten(fresh, spec), META)
        grown = [v for v in fresh if isinstance(v, Tensor) and v.requires_grad]
        # Autograd refuses in-place changes of leaves, so the node gets views of them.
        with FlopCounterMode(display=False) as forward, torch.enable_grad():
            seen, seen_options = pytree.tree_map_only(Tensor, _behind, (again, options))
            value = target(*seen, **seen_options)
        results = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
        moved = _bytes([*(v for v in fresh if isinstance(v, Tensor)), *results]) / self.bytes
        roots = [v for v in results if v.requires_grad]
        ahead = forward.get_total_flops() / self.flops + moved
        if not roots or not grown:
            return Cost(ahead)
        weights = [v for v in grown if isinstance(v, torch.nn.Parameter)]
        others = [v for v in grown if not isinstance(v, torch.nn.Parameter)]
        through, onto = (_backward(roots, side) for side in (others, weights))
        return Cost(
            ahead,
            through / self.flops + moved if others else 0.0,
            onto / self.flops + _bytes(weights) / self.bytes + (0.0 if others else moved),
            # Computed separately, both gradients read what the node saved.
            apart=moved if others and weights else 0.0,
        )


def cost_source(
    trace: Trace, costs: Literal["measured", "analytic"] | DeviceSpeed = "measured"
) -> CostSource:
    """The source for the option `costs`; random values for a model on the meta device."""
    if isinstance(costs, DeviceSpeed):
        return costs
    if costs == "analytic":
        return DeviceSpeed()
    on_meta = any(state.tensor.is_meta for state in trace.states.values())
    return RandomValues() if on_meta else Measured()


def profile(
    trace: Trace,
    tensors: Sequence[Tensor],
    *,
    repeats: int = 2,
    progress: Progress | None = None,
    source: CostSource | None = None,
    apart: bool = False,
) -> list[Cost]:
    """The cost of every node for these inputs. In each pass, one of equal nodes is measured.

    Each node runs alone, once to warm up and then `repeats` times, forward and backward. The least time of
    two passes over the graph counts, so that a short disturbance affects only one of them. Then the graph
    runs as in a step, and the extra time is divided among the nodes. With `apart`, a backward pass in two
    parts is measured too. The model's buffers and the random state are restored. If the source does not use
    the model's values, the graph runs only for its shapes.
    """
    source = source or Measured()
    runner = _Profiler(trace, repeats, _PASSES * len(trace.line.nodes), progress, source, apart)
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        with working("timing each node"):
            for _ in range(_PASSES):
                runner.measured.clear()
                values = _arguments(trace, tensors)
                runner.run(*(values if source.real else to_meta(values)))
        saved, weights = saved_bytes(trace), weight_bytes(trace)
        costs = [
            replace(runner.costs.get(n, Cost()), saved=saved[i], weights=weights[i])
            for i, n in enumerate(trace.line.nodes)
        ]
        if not source.real:
            return costs  # the source has set `Cost.apart` of each node
        costs = costs_in_step(trace, tensors, costs, repeats)
        share = share_apart(trace, tensors, costs, repeats) if apart else 0.0
        return [replace(c, apart=share * c.backward) for c in costs]


def memory_costs(trace: Trace) -> list[Cost]:
    """The bytes of every node; no time is measured."""
    return [Cost(saved=s, weights=w) for s, w in zip(saved_bytes(trace), weight_bytes(trace), strict=True)]


def saved_bytes(trace: Trace) -> list[int]:
    """The bytes that autograd saves for each node, from a run on fake tensors.

    A tensor that two nodes save counts for the first. Parameters do not count.
    """
    runner = _Saver(trace)
    # Fake tensors with the example's lengths: this run must not add constraints to the dynamic lengths.
    with FakeTensorMode() as mode, torch.enable_grad():
        runner.run(*trace.fakes(mode, trace.signature.example))
    return [runner.saved.get(n, 0) for n in trace.line.nodes]


def weight_bytes(trace: Trace) -> list[int]:
    """The bytes of the states that each node is the first to read."""
    out, seen = [0] * len(trace.line.nodes), set()
    for i, node in enumerate(trace.line.nodes):
        for value in node.all_input_nodes:
            state = trace.states.get(value)
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                out[i] += state.bytes
    return out


class _Profiler(fx.Interpreter):
    """Runs the graph node by node, and records the cost of each node."""

    def __init__(
        self,
        trace: Trace,
        repeats: int,
        count: int,
        progress: Progress | None,
        source: CostSource,
        apart: bool,
    ) -> None:
        super().__init__(trace.module, graph=trace.graph)
        self.source, self.apart = source, apart
        self.repeats, self.count, self.progress = repeats, count, progress
        self.costs: dict[fx.Node, Cost] = {}
        self.measured: dict[Any, Cost] = {}
        self.done = 0

    def run_node(self, n: fx.Node) -> Any:
        if not is_compute(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not self.source.real:
            args, kwargs = on_device((args, kwargs), META)
        key = _key(n, args, kwargs)
        cost = self.measured.get(key) if key is not None else None
        if cost is None:
            cost = self.source.cost(n.target, args, kwargs, self.repeats, self.apart)  # type: ignore[arg-type]
            if key is not None:
                self.measured[key] = cost
        self.costs[n] = cost if n not in self.costs else _least(cost, self.costs[n])
        self.done += 1
        tell_share(self.done, self.count)
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
        apart=min(a.apart, b.apart),
    )


class _Saver(fx.Interpreter):
    """Runs the graph on fake tensors, and records the bytes that autograd saves for each node."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.module, graph=trace.graph)
        self.trace = trace
        self.saved: dict[fx.Node, int] = {}
        self.seen: set[Any] = set()
        self.held: list[torch.Tensor] = []

    def run(self, *args: Any, **options: Any) -> Any:
        # Weights are in memory anyway, so they do not count.
        placeholders = self.trace.graph.find_nodes(op="placeholder")
        values = list(args)
        for i, (node, value) in enumerate(zip(placeholders, args, strict=True)):
            if node in self.trace.states:
                values[i] = value.detach().requires_grad_(self.trace.states[node].tensor.requires_grad)
                self.seen.add(_storage(values[i]))
        return super().run(*values, **options)

    def run_node(self, n: fx.Node) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = _storage(tensor)
            if key not in self.seen:
                self.seen.add(key)
                self.held.append(tensor)  # stays alive, so that no other tensor gets its storage
                self.saved[n] = self.saved.get(n, 0) + tensor.nbytes
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


def _arguments(trace: Trace, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The arguments of the graph for these inputs, with copies of buffers."""
    inputs = dict(zip(trace.inputs, tensors, strict=True))

    def own(node: fx.Node, state: Tensor) -> Tensor:
        return state if isinstance(state, torch.nn.Parameter) else state.detach().clone()

    return trace.arguments(inputs.get, own)


def _backward(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> int:
    if not leaves:
        return 0
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(
            roots, leaves, [torch.ones_like(r) for r in roots], retain_graph=True, allow_unused=True
        )
    return int(counter.get_total_flops())


def _leaf(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device=META)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty.requires_grad_(value.requires_grad)


def _behind(value: Tensor) -> Tensor:
    return value.view_as(value) if value.requires_grad else value


def _random(value: Tensor, device: torch.device) -> Tensor:
    if not value.is_meta:
        return value.to(device)
    # The value may be expanded, so the result is a view with its strides.
    steps = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if value.numel() else 0
    memory = torch.zeros(extent, dtype=value.dtype, device=device)
    if value.is_floating_point():
        memory.uniform_()
    tensor = memory.as_strided(value.shape, value.stride())
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor.requires_grad_(value.requires_grad)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)

"""Cuts of a model that cannot be exported, between calls of its modules."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intarsia.errors import CaptureError, error_text
from intarsia.graph.line import Line
from intarsia.graph.piece import pieces_at, relayed
from intarsia.pipeline.cost import Cost, measure_node
from intarsia.pipeline.gpipe.effects import BufferSnapshot, owned_buffers, trial
from intarsia.pipeline.gpipe.keyed_random import SeenDraws, layer_place
from intarsia.pipeline.stages.export import TokenMeans, trace_without_chance, trace_without_counters
from intarsia.pipeline.stages.samples import Incomparable, difference_in_halves
from intarsia.pipeline.stages.sequence import SplitReport, StageSequence
from intarsia.pipeline.stages.signature import (
    BatchDims,
    CallSignature,
    Fixed,
    TensorSpec,
    batch_axes,
    tensor_spec,
)
from intarsia.pipeline.stages.tied import find_tied
from intarsia.pipeline.stages.tree_stage import RandomPlaces, TreeStage, keep_the_rest, note_writes

_CALLS_PER_STAGE = 4  # enough calls to balance the stages
# The least number of calls, for any number of stages. Each called module starts its own random numbers, so
# different cuts should call the same modules.
_CALLS = 64

Choose = Callable[[Line, Sequence[Cost], Sequence[float]], list[int]]
"""(line, costs of nodes, price of each place) -> the places to cut at."""


def split_tree(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    stages: int,
    by: str,
    reason: str,
    choose: Choose,
    batch_dims: BatchDims | None = None,
    mixes: str = "",
) -> StageSequence:
    """The stages of a model that is cut between calls of modules; `reason` is why the graph is not cut.

    Each `forward` is traced with calls of its submodules as single nodes, so submodules may have any control
    flow. A module that cannot be traced stays whole. On the example, the outputs of the stages must be equal
    to the model's. `mixes` is why samples depend on each other, if a graph has shown it.
    """
    bound = _bind(model, args, kwargs, reason)
    tensors = {name: value for name, value in bound.items() if isinstance(value, torch.Tensor)}
    graph = _trace(model, bound, tensors, max(_CALLS, stages * _CALLS_PER_STAGE), reason)
    recorder = _Recorder(model, graph, timed=by == "time")
    owners = owned_buffers(model)
    identity = {(id(module), name): id(module._buffers[name]) for module, name in owners}
    snapshot = BufferSnapshot.take(owners)
    with trial(model):
        recorder.run(*tensors.values())
        changed = {identity[id(module), name] for module, name in snapshot.changed().values}
    line = Line(graph, (), (), lambda node: False)
    costs = [recorder.costs.get(n, Cost()) for n in line.nodes]
    prices = [float(size) for size in line.crossing_bytes]
    cuts = choose(line, costs, prices)
    parts = _build(model, graph, line, cuts, recorder.means)
    mixes = mixes or _mixed(model, args, kwargs or {}, batch_dims)
    note_writes(parts, changed)
    for part in parts:
        part.random_places = RandomPlaces(recorder.places, recorder.draws)
    bounds = [0, *cuts, len(line.nodes)]
    report = SplitReport(
        "modules",
        reason,
        by,
        tuple(sum(costs[a:b], Cost()) for a, b in itertools.pairwise(bounds)),
        tuple(tuple(p.output_names) for p in parts[:-1]),
        tuple(int(prices[c]) for c in cuts),
        find_tied(parts),
        tuple(map(line.waist, cuts)),
        changed=tuple(sorted(n for n, b in model.named_buffers() if id(b) in changed)),
        mixes=mixes,
    )
    with trial(model), torch.no_grad():
        output = model(*args, **(kwargs or {}))
    signature = replace(_signature(model, list(bound), args, kwargs or {}, output, batch_dims), mixes=mixes)
    sequence = StageSequence(parts, signature, report, list(model.state_dict()))
    _verify(model, sequence, args, kwargs, reason)
    return sequence


def _mixed(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: BatchDims | None
) -> str:
    """How the samples of a batch depend on each other in forward passes."""
    axes, _ = batch_axes(model, args, kwargs, batch_dims)
    try:
        return difference_in_halves(model, args, kwargs, axes) if any(a is not None for a in axes) else ""
    except Incomparable:
        return ""  # the plain model does not take a larger batch either


class _Tracer(fx.Tracer):
    """Traces the root and the opened modules; calls of other modules are single nodes."""

    def __init__(self, opened: set[str], fixed: Mapping[str, Any], tensors: Sequence[str]) -> None:
        super().__init__()
        self.opened, self.fixed, self.tensors = opened, fixed, tensors

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether calls of a module are single nodes."""
        return module_qualified_name not in self.opened

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """A placeholder for each tensor. Other arguments have the example's value; each call checks it."""
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self.tensors]

        def call(*values: Any) -> Any:
            return root_fn(self.root, **self.fixed, **dict(zip(self.tensors, values, strict=True)))

        return call, proxies


def _trace(
    model: nn.Module, bound: dict[str, Any], tensors: Mapping[str, Any], enough: int, reason: str
) -> fx.Graph:
    """The traced graph; modules are opened, the largest first, until there are `enough` calls."""
    fixed = {name: value for name, value in bound.items() if name not in tensors}
    opened: set[str] = set()
    closed: set[str] = set()
    graph = _attempt(model, opened, fixed, tensors)
    if isinstance(graph, str):
        raise _cut_error(reason, graph)
    while True:
        calls = [str(n.target) for n in graph.nodes if n.op == "call_module"]
        waiting = [c for c in calls if c not in closed and any(model.get_submodule(c).children())]
        if len(calls) >= enough or not waiting:
            return graph
        name = max(waiting, key=lambda c: sum(p.numel() for p in model.get_submodule(c).parameters()))
        wider = _attempt(model, opened | {name}, fixed, tensors)
        if isinstance(wider, str):
            closed.add(name)
        else:
            opened.add(name)
            graph = wider


def _attempt(
    model: nn.Module, opened: set[str], fixed: Mapping[str, Any], tensors: Mapping[str, Any]
) -> fx.Graph | str:
    def traced() -> fx.Graph:
        return trace_without_chance(lambda: _Tracer(opened, fixed, list(tensors)).trace(model))

    try:
        graph = trace_without_counters(traced, model, (), {**fixed, **tensors})
    except Exception as error:
        return error_text(error)
    attributes = [n for n in graph.nodes if n.op == "get_attr"]
    if any("_tensor_constant" in str(n.target) for n in attributes):
        return "it creates tensors that tracing would freeze"
    others = [v for n in attributes if not isinstance(v := attrgetter(str(n.target))(model), torch.Tensor)]
    if others:
        return f"it creates a {type(others[0]).__name__} that tracing would freeze"
    return graph


class _Recorder(fx.Interpreter):
    """Runs the example once, and records the cost of every call and the size of every value."""

    def __init__(self, model: nn.Module, graph: fx.Graph, timed: bool) -> None:
        super().__init__(model, graph=graph)
        self.timed = timed
        self.costs: dict[fx.Node, Cost] = {}
        self.means: list[str] = []  # calls that compute a mean over tokens
        self.draws: dict[str, int] = {}  # the number of the first draw, for nodes that call no module
        self.drawn = 0
        self.places: dict[str, str] = {}  # the random place of each call of a module
        self.calls: Counter[str] = Counter()

    def run_node(self, n: fx.Node) -> Any:
        with TokenMeans() as seen, SeenDraws() as random:
            value = super().run_node(n)
        if seen.computed:
            self.means.append(n.name)
        if n.op != "call_module" and random.count:
            self.draws[n.name] = self.drawn
            self.drawn += random.count
        if n.op == "call_module":
            self.places[n.name] = layer_place(str(n.target), self.calls[str(n.target)])
            self.calls[str(n.target)] += 1
            module = self.fetch_attr(str(n.target))
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            parameters = list(module.parameters())
            cost = measure_node(module, args, kwargs, 3, parameters) if self.timed else Cost()
            outputs = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
            saved, weights = (sum(t.nbytes for t in tensors) for tensors in (outputs, parameters))
            self.costs[n] = replace(cost, saved=saved, weights=weights)
        n.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), value)
        return value


def _build(
    model: nn.Module, graph: fx.Graph, line: Line, cuts: Sequence[int], means: Sequence[str]
) -> list[TreeStage]:
    pieces = pieces_at(fx.GraphModule(model, graph), line, cuts)
    (output,) = graph.output_node().args
    results = [v for v in pytree.tree_leaves(output) if isinstance(v, fx.Node)]
    parts = []
    for piece, (takes, gives) in zip(pieces, relayed(pieces, line.inputs, results), strict=True):
        parts.append(TreeStage(piece, model, [n.name for n in takes], [n.name for n in gives]))
    keep_the_rest(model, parts)
    for part in parts:
        here = {node.name for node in part.graph.nodes}
        part.mean_node = next((n for n in means if n in here), None)
    parts[-1].answer = tuple(leaf for node in results for leaf in pytree.tree_leaves(node.meta["val"]))
    return parts


def _bind(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, reason: str
) -> dict[str, Any]:
    """The arguments of the example, by name."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise CaptureError(f"the example does not fit forward: {error}") from error
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            raise _cut_error(reason, f"it takes *{name}")
        else:
            arguments[name] = value
    for name, value in arguments.items():
        if isinstance(value, tuple | list | dict) and value:
            raise _cut_error(reason, f"nested inputs: {name} is a {type(value).__name__}")
    # In the order of the call, like its tensors.
    return {name: arguments[name] for name in [*list(arguments)[: len(args)], *(kwargs or {})]}


def _signature(
    model: nn.Module,
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Any,
    batch_dims: BatchDims | None,
) -> CallSignature:
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    axes, _ = batch_axes(model, args, kwargs, batch_dims)
    names = [*names[: len(args)], *kwargs]
    batch = next((v.shape[a] for v, a in zip(leaves, axes, strict=True) if a is not None), -1)
    inputs = tuple(
        _open(tensor_spec(name, leaf), axis) if isinstance(leaf, torch.Tensor) else Fixed(name, leaf)
        for name, leaf, axis in zip(names, leaves, axes, strict=True)
    )
    results, out_spec = pytree.tree_flatten(output)
    outputs = tuple(
        _open(tensor_spec(f"output {i}", r), 0 if r.ndim and r.shape[0] == batch else None)
        if isinstance(r, torch.Tensor)
        else Fixed(f"output {i}", r)
        for i, r in enumerate(results)
    )
    return CallSignature(
        inputs=inputs,
        in_spec=in_spec,
        out_spec=out_spec,
        outputs=outputs,
        batch="batch" if batch >= 0 else None,
        ranges={},
        example={"batch": batch},
        axes=dict(zip(names, axes, strict=True)),
        forward=inspect.signature(model.forward),
    )


def _open(spec: TensorSpec, axis: int | None) -> TensorSpec:
    """The spec with a dynamic batch: the modules themselves run, so the batch may have any length."""
    if axis is None:
        return spec
    return TensorSpec(spec.name, (*spec.shape[:axis], "batch", *spec.shape[axis + 1 :]), spec.dtype)


def _verify(
    model: nn.Module,
    stages: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    reason: str,
) -> None:
    """Raise CaptureError if the outputs of the stages differ from the model's."""
    outputs = []
    for call in (model, stages):
        with trial(model), torch.no_grad():
            torch.manual_seed(0)
            outputs.append(pytree.tree_leaves(call(*args, **(kwargs or {}))))
    for a, b in zip(*outputs, strict=True):
        if isinstance(a, torch.Tensor) and not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise _cut_error(reason, "its outputs would differ")


def _cut_error(graph: str, modules: str) -> CaptureError:
    """The error for a model that cannot be cut: why not by its graph, and why not by its modules."""
    return CaptureError(f"the model can be cut neither by its graph ({graph}) nor by its modules ({modules})")

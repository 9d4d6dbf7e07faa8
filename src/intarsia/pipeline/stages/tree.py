"""Cutting a model that cannot be exported, along the calls between its modules."""

from __future__ import annotations

import inspect
import itertools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intarsia.errors import CaptureError, InputError
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.stages.cut import choose_cuts
from intarsia.pipeline.stages.sequence import SplitReport, StageSequence
from intarsia.pipeline.stages.signature import CallSignature, Fixed, TensorSpec, tensor_spec
from intarsia.pipeline.stages.tied import find_tied

_ENOUGH = 4  # modules a stage, so that the balance has something to choose from


class TreeStage(nn.Module):
    """A stage that calls the model's own modules, which keep their names."""

    def __init__(
        self, graph: fx.Graph, root: nn.Module, inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        super().__init__()
        object.__setattr__(self, "graph", graph)
        self.input_names, self.output_names = tuple(inputs), tuple(outputs)
        self.captured_training = root.training
        for node in graph.nodes:
            if node.op == "call_module":
                _graft(self, str(node.target), root.get_submodule(str(node.target)))
            elif node.op == "get_attr":
                _graft_tensor(self, str(node.target), root)
        self.training = root.training

    graph: fx.Graph

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Compute the values of the next border from those of the last one."""
        if self.training != self.captured_training:
            raise InputError(
                "this stage was cut in the other mode; split the model again after train() or eval()"
            )
        return tuple(fx.Interpreter(self, graph=self.graph).run(*values))

    def extra_repr(self) -> str:
        """The border values on both sides."""
        return f"({', '.join(self.input_names)}) -> ({', '.join(self.output_names)})"


def split_tree(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    stages: int,
    by: str,
    reason: str,
) -> StageSequence:
    """Cut between module calls; `reason` says why the graph could not be cut.

    The calls are found by tracing each `forward` with its submodules left closed, so control flow inside a
    submodule may be anything; where it is in the way, that module stays whole. The cut model is compared with
    the plain one on the example before it is returned.
    """
    bound = _bind(model, args, kwargs, reason)
    graph = _trace(model, bound, stages * _ENOUGH, reason)
    tensors = [v for v in bound.values() if isinstance(v, torch.Tensor)]
    recorder = _Recorder(model, graph, timed=by == "time")
    with torch.random.fork_rng():
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        output = recorder.run(*tensors)
        _restore(model, buffers)
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    last = _last_uses(graph, nodes)
    costs = [recorder.costs.get(n, Cost()) for n in nodes]
    weights = [c.seconds if by == "time" else float(c.weights + c.saved) for c in costs]
    crossing = [
        float(sum(recorder.sizes[v] for v in _crossing(nodes, last, i))) for i in range(len(nodes) + 1)
    ]
    cuts = choose_cuts(weights, crossing, range(1, len(nodes)), stages)
    parts = _build(model, graph, nodes, last, cuts)
    signature = _signature(bound, args, kwargs, output)
    bounds = [0, *cuts, len(nodes)]
    report = SplitReport(
        "modules",
        reason,
        by,
        tuple(sum(costs[a:b], Cost()) for a, b in itertools.pairwise(bounds)),
        tuple(tuple(p.output_names) for p in parts[:-1]),
        tuple(int(crossing[c]) for c in cuts),
        find_tied(parts),
    )
    made = StageSequence(parts, signature, report, list(model.state_dict()))
    _verify(model, made, args, kwargs, reason)
    return made


class _Tracer(fx.Tracer):
    """Traces the root and the modules it was told to open; all others are single calls."""

    def __init__(self, opened: set[str]) -> None:
        super().__init__()
        self.opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module stays closed."""
        return module_qualified_name not in self.opened


def _trace(model: nn.Module, bound: dict[str, Any], enough: int, reason: str) -> fx.Graph:
    """Open modules, the largest first, until there are enough calls to choose cuts from."""
    fixed = {k: v for k, v in bound.items() if not isinstance(v, torch.Tensor)}
    opened: set[str] = set()
    closed: set[str] = set()
    graph = _attempt(model, opened, fixed)
    if isinstance(graph, str):
        raise CaptureError(
            f"the model can be cut neither by its graph ({reason}) nor by its modules ({graph})"
        )
    while True:
        calls = [str(n.target) for n in graph.nodes if n.op == "call_module"]
        waiting = [c for c in calls if c not in closed and any(model.get_submodule(c).children())]
        if len(calls) >= enough or not waiting:
            return graph
        name = max(waiting, key=lambda c: sum(p.numel() for p in model.get_submodule(c).parameters()))
        wider = _attempt(model, opened | {name}, fixed)
        if isinstance(wider, str):
            closed.add(name)
        else:
            opened.add(name)
            graph = wider


def _attempt(model: nn.Module, opened: set[str], fixed: dict[str, Any]) -> fx.Graph | str:
    tracer = _Tracer(opened)
    try:
        graph = tracer.trace(model, concrete_args=fixed or None)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    # Values that are no tensors are written into the graph; the signature checks them, not these asserts.
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        name = str(node.target).rpartition("_")[0]
        if name in fixed and not _erase_asserts(graph, node):
            return f"it computes with {name}={fixed[name]!r}, which is no tensor"
    if any(n.op == "get_attr" and "_tensor_constant" in str(n.target) for n in graph.nodes):
        return "it makes tensors of its own that tracing would freeze"
    return graph


def _erase_asserts(graph: fx.Graph, node: fx.Node) -> bool:
    if node.op != "placeholder" and node.target not in (operator.eq, torch._assert):
        return False
    if not all(_erase_asserts(graph, user) for user in list(node.users)):
        return False
    graph.erase_node(node)
    return True


class _Recorder(fx.Interpreter):
    """Runs the example once, noting the cost of every call and the size of every value."""

    def __init__(self, model: nn.Module, graph: fx.Graph, timed: bool) -> None:
        super().__init__(model, graph=graph)
        self.timed = timed
        self.costs: dict[fx.Node, Cost] = {}
        self.sizes: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            weights = sum(p.numel() * p.element_size() for p in module.parameters())
            seconds = _time(module, *self.fetch_args_kwargs_from_env(n)) if self.timed else (0.0, 0.0)
            self.costs[n] = Cost(seconds[0], seconds[1], saved=_bytes(value), weights=weights)
        self.sizes[n] = _bytes(value)
        return value


def _time(module: nn.Module, args: Any, kwargs: Any, repeats: int = 3) -> tuple[float, float]:
    """Seconds forward and backward: once to warm up, then the least of `repeats`."""
    inputs, spec = pytree.tree_flatten((args, kwargs))
    forward, backward = [], []
    for _ in range(repeats + 1):
        fresh = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in inputs]
        grown = [v.requires_grad_() for v in fresh if isinstance(v, torch.Tensor) and v.is_floating_point()]
        again, options = pytree.tree_unflatten(fresh, spec)
        begin = time.perf_counter()
        with torch.enable_grad():
            value = module(*again, **options)
        forward.append(time.perf_counter() - begin)
        roots = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor) and v.requires_grad]
        leaves = [*grown, *(p for p in module.parameters() if p.requires_grad)]
        begin = time.perf_counter()
        if roots and leaves:
            torch.autograd.grad(roots, leaves, [torch.ones_like(r) for r in roots], allow_unused=True)
        backward.append(time.perf_counter() - begin)
    return min(forward[1:]), min(backward[1:])


def _bytes(value: Any) -> int:
    tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _last_uses(graph: fx.Graph, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    place = {n: i for i, n in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            uses = [len(nodes) if u.op == "output" else place[u] for u in node.users]
            last[node] = max(uses, default=-1)
    return last


def _crossing(nodes: Sequence[fx.Node], last: Mapping[fx.Node, int], cut: int) -> list[fx.Node]:
    place = {n: i for i, n in enumerate(nodes)}
    return [v for v in last if place.get(v, -1) < cut <= last[v]]


def _build(
    model: nn.Module,
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    last: Mapping[fx.Node, int],
    cuts: Sequence[int],
) -> list[TreeStage]:
    bounds = [0, *cuts, len(nodes)]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    parts = []
    for first, end in itertools.pairwise(bounds):
        entering = inputs if first == 0 else _crossing(nodes, last, first)
        piece = fx.Graph()
        made: dict[fx.Node, fx.Node] = {n: piece.placeholder(n.name) for n in entering}
        for node in [n for n in graph.nodes if n.op == "get_attr"]:
            if any(u in nodes[first:end] for u in node.users):
                made[node] = piece.node_copy(node)
        for node in nodes[first:end]:
            made[node] = piece.node_copy(node, made.__getitem__)
        if end == len(nodes):
            (answer,) = next(iter(reversed(graph.nodes))).args
            leaving: Any = [v for v in pytree.tree_leaves(answer) if isinstance(v, fx.Node)]
        else:
            leaving = _crossing(nodes, last, end)
        piece.output(tuple(made[v] for v in leaving))
        parts.append(TreeStage(piece, model, [n.name for n in entering], [n.name for n in leaving]))
    _keep_the_rest(model, parts)
    return parts


def _keep_the_rest(model: nn.Module, parts: Sequence[TreeStage]) -> None:
    """Parameters and buffers that no call uses stay with the first stage."""
    known = {name for part in parts for name in [*dict(part.named_parameters()), *dict(part.named_buffers())]}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        if name not in known:
            _graft_tensor(parts[0], name, model)


def _graft(stage: nn.Module, path: str, module: nn.Module) -> None:
    *parents, leaf = path.split(".")
    _walk(stage, parents).add_module(leaf, module)


def _graft_tensor(stage: nn.Module, path: str, root: nn.Module) -> None:
    *parents, leaf = path.split(".")
    owner = root.get_submodule(".".join(parents))
    holder = _walk(stage, parents)
    if leaf in owner._parameters:
        holder.register_parameter(leaf, owner._parameters[leaf])
    else:
        persistent = leaf not in owner._non_persistent_buffers_set
        holder.register_buffer(leaf, getattr(owner, leaf), persistent=persistent)


def _walk(stage: nn.Module, parents: Sequence[str]) -> nn.Module:
    for part in parents:
        if part not in stage._modules:
            holder = nn.Module()
            holder.training = stage.training
            stage.add_module(part, holder)
        stage = stage.get_submodule(part)
    return stage


def _bind(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, reason: str
) -> dict[str, Any]:
    try:
        bound = inspect.signature(model.forward).bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise CaptureError(f"the example does not fit forward: {error}") from error
    bound.apply_defaults()
    if any(isinstance(v, tuple | list | dict) and v for v in bound.arguments.values()):
        raise CaptureError(
            f"the model can be cut neither by its graph ({reason}) nor by its modules (nested inputs)"
        )
    return {k: v for k, v in bound.arguments.items() if not isinstance(v, tuple | dict)}


def _signature(
    bound: dict[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, output: Any
) -> CallSignature:
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    names = list(bound)
    batch = next((v.shape[0] for v in leaves if isinstance(v, torch.Tensor) and v.ndim), -1)
    inputs: list[TensorSpec | Fixed] = []
    for i, leaf in enumerate(leaves):
        name = names[i] if i < len(args) else list(kwargs or {})[i - len(args)]
        inputs.append(
            _open(tensor_spec(name, leaf), batch) if isinstance(leaf, torch.Tensor) else Fixed(name, leaf)
        )
    results, out_spec = pytree.tree_flatten(output)
    outputs = tuple(
        _open(tensor_spec(f"output {i}", r), batch)
        if isinstance(r, torch.Tensor)
        else Fixed(f"output {i}", r)
        for i, r in enumerate(results)
    )
    return CallSignature(
        inputs=tuple(inputs),
        in_spec=in_spec,
        keywords=tuple(kwargs or {}),
        out_spec=out_spec,
        outputs=outputs,
        batch="batch" if batch >= 0 else None,
        ranges={},
        example={"batch": batch},
    )


def _open(spec: TensorSpec, batch: int) -> TensorSpec:
    """The modules run as they are, so the batch may have any length."""
    if not spec.shape or spec.shape[0] != batch:
        return spec
    return TensorSpec(spec.name, ("batch", *spec.shape[1:]), spec.dtype)


def _restore(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])


def _verify(
    model: nn.Module,
    made: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    reason: str,
) -> None:
    """Refuse a cut that answers differently from the model."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    answers = []
    for call in (model, made):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            answers.append(pytree.tree_leaves(call(*args, **(kwargs or {}))))
        _restore(model, buffers)
    for a, b in zip(*answers, strict=True):
        if isinstance(a, torch.Tensor) and not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise CaptureError(
                f"the model can be cut neither by its graph ({reason})"
                " nor by its modules (answers would differ)"
            )

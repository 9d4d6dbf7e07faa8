"""One stage of a cut model: a plain module that holds its part of the weights under their old names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.gpipe.checkpoint import is_recomputing
from intarsia.pipeline.stages.flow import Flow, is_length
from intarsia.pipeline.stages.signature import TensorSpec, tensor_spec
from intarsia.pipeline.stages.trace import State


@dataclass(frozen=True)
class Piece:
    """The part of a graph that one stage runs: states, then inputs, go in; a tuple comes out."""

    run: fx.GraphModule
    states: tuple[State, ...]
    written: tuple[bool, ...]  # which of the states the piece changes
    inputs: tuple[TensorSpec | str, ...]  # a tensor, or the name of a whole number
    outputs: tuple[TensorSpec | str, ...]
    nodes: tuple[str, ...]


class Stage(nn.Module):
    """A stage that runs a piece of the captured graph.

    Its parameters are the model's own objects and its `state_dict` has the model's own keys. The capture
    knows one mode only, training or evaluation, and the stage refuses to run in the other.
    """

    def __init__(self, piece: Piece, states: Iterable[State], training: bool) -> None:
        super().__init__()
        for state in states:
            for name in state.names:
                _attach(self, name, state.tensor, state.persistent)
        # Not registered: the piece holds no tensor, and its name must not enter state_dict's keys.
        object.__setattr__(self, "piece", piece)
        object.__setattr__(self, "captured_training", training)
        object.__setattr__(self, "_read", tuple(attrgetter(s.name) for s in piece.states))
        self.training = training

    piece: Piece
    captured_training: bool
    _read: tuple[attrgetter[Any], ...]

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Compute the values of the next border from those of the last one."""
        if self.training != self.captured_training:
            have, want = (_mode(m) for m in (self.training, self.captured_training))
            raise InputError(
                f"this stage was cut in {want} mode and is asked to run in {have} mode: dropout and batch"
                f" norm are fixed by the capture; split the model again after model.{_call(self.training)}"
            )
        held = [read(self) for read in self._read]
        if is_recomputing():
            # The statistics were updated the first time; running again must leave them alone.
            held = [t.clone() if w else t for t, w in zip(held, self.piece.written, strict=True)]
        return tuple(self.piece.run(*held, *values))

    def to_device(self, device: torch.device | str) -> Stage:
        """Move the weights, and the devices written into the graph (of `arange`, `zeros`), to `device`."""
        target = torch.device(device)
        for module in self.piece.run.modules():
            if isinstance(module, fx.GraphModule):
                for node in module.graph.nodes:
                    node.args = _on_device(node.args, target)
                    node.kwargs = _on_device(node.kwargs, target)
                module.recompile()
        return self.to(target)

    def extra_repr(self) -> str:
        """The border values on both sides."""
        sides = (", ".join(map(str, side)) for side in (self.piece.inputs, self.piece.outputs))
        return " -> ".join(f"({side})" for side in sides)


def build_stages(flow: Flow, cuts: Sequence[int]) -> list[Stage]:
    """Cut the flow at `cuts` and make one stage of each part.

    Stages are built from the last to the first, because a stage learns from its successor which lengths it
    must hand over.
    """
    _check(flow, cuts)
    bounds = [0, *cuts, len(flow.nodes)]
    wanted: list[fx.Node] = list(flow.trace.results)
    pieces: list[Piece] = []
    for first, last in reversed(list(itertools.pairwise(bounds))):
        entering = list(flow.trace.inputs) if first == 0 else list(flow.crossing(first))
        builder = _Builder(flow, first, last, entering)
        pieces.append(builder.build(wanted))
        wanted = [*entering, *builder.lengths]
    pieces.reverse()
    homes = _homes(flow, pieces)
    return [Stage(p, homes[i], flow.trace.training) for i, p in enumerate(pieces)]


def _homes(flow: Flow, pieces: Sequence[Piece]) -> list[list[State]]:
    """The states each stage holds: what it reads; what nobody reads stays with the first."""
    homes = [list(dict.fromkeys(p.states)) for p in pieces]
    used = {id(s) for home in homes for s in home}
    homes[0] += [s for s in dict.fromkeys(flow.trace.states.values()) if id(s) not in used]
    return homes


class _Builder:
    """Copies the nodes of one stage into a graph of its own."""

    def __init__(self, flow: Flow, first: int, last: int, entering: list[fx.Node]) -> None:
        self.flow, self.first, self.last, self.entering = flow, first, last, entering
        self.lengths: list[fx.Node] = []
        self.states: dict[fx.Node, State] = {}
        self.here = set(flow.nodes[first:last]) - flow.replayed

    def build(self, wanted: Sequence[fx.Node]) -> Piece:
        """Copy what the stage must compute and give out `wanted`."""
        flow, trace = self.flow, self.flow.trace
        mine = [n for n in flow.nodes[self.first : self.last] if n in self.here]
        order = self._closure([*mine, *wanted])
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {n: graph.placeholder(f"state_{i}") for i, n in enumerate(self.states)}
        for value in [*self.entering, *self.lengths]:
            made[value] = graph.placeholder(value.name)
            made[value].meta = dict(value.meta)
        for node in order:
            if node in self._measured:
                tensor, dim = self._measured[node]
                made[node] = graph.call_function(torch.ops.aten.sym_size.int, (made[tensor], dim))
                made[node].meta = dict(node.meta)
            elif node not in made:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[v] for v in wanted))
        run = fx.GraphModule(trace.module, graph, class_name="Piece")
        return Piece(
            run=run,
            states=tuple(self.states.values()),
            written=tuple(n in flow.written for n in self.states),
            inputs=tuple(_describe(v) for v in [*self.entering, *self.lengths]),
            outputs=tuple(_describe(v) for v in wanted),
            nodes=tuple(n.name for n in order),
        )

    def _closure(self, roots: Sequence[fx.Node]) -> list[fx.Node]:
        """Everything the roots need that is computed here, in order; notes states and missing lengths."""
        self._measured: dict[fx.Node, tuple[fx.Node, int]] = {}
        done: dict[fx.Node, None] = dict.fromkeys(self.entering)
        order: list[fx.Node] = []
        stack: list[tuple[fx.Node, bool]] = [(r, False) for r in reversed(roots)]
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if node in self.flow.trace.states:
                self.states[node] = self.flow.trace.states[node]
                done[node] = None
            elif ready or (is_length(node) and self._find_length(node)):
                done[node] = None
                order.append(node)
            elif is_length(node) and not self._can_compute(node):
                done[node] = None
                self.lengths.append(node)
            elif node.op == "get_attr" or node in self.here or node in self.flow.replayed:
                stack.append((node, True))
                stack += [(a, False) for a in reversed(node.all_input_nodes)]
            else:
                raise PartitionError(f"stage needs {node.name}, which no earlier stage hands over")
        return order

    def _find_length(self, node: fx.Node) -> bool:
        """Read a length from an entering tensor that has it."""
        wanted = str(node.meta["val"].node.expr)
        for tensor in self.entering:
            value = tensor.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and str(size.node.expr) == wanted:
                    self._measured[node] = (tensor, dim)
                    return True
        return False

    def _can_compute(self, node: fx.Node) -> bool:
        """Whether a length can be computed from what is here."""
        return all(
            a in self.here
            or a in self.entering
            or (is_length(a) and (self._find_length(a) or self._can_compute(a)))
            or (a in self.flow.replayed and not is_length(a))
            for a in node.all_input_nodes
        ) and (self.flow.index[node] >= self.first or not _reads_data(node))


def _reads_data(node: fx.Node) -> bool:
    return any(isinstance(a.meta.get("val"), torch.Tensor) for a in node.all_input_nodes)


def _check(flow: Flow, cuts: Sequence[int]) -> None:
    allowed = set(flow.allowed)
    for cut in cuts:
        if cut not in allowed:
            raise PartitionError(
                f"the graph may not be cut before node {cut}: a value is changed in place there"
            )
    if list(cuts) != sorted(set(cuts)):
        raise PartitionError(f"cuts={list(cuts)} must grow")


def _describe(node: fx.Node) -> TensorSpec | str:
    value = node.meta["val"]
    return tensor_spec(node.name, value) if isinstance(value, torch.Tensor) else node.name


def _attach(root: nn.Module, name: str, tensor: torch.Tensor, persistent: bool) -> None:
    """Register a tensor under a dotted name, making the modules on the way."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor, persistent=persistent)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device):
        return device
    if isinstance(value, tuple | list):
        return type(value)(_on_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: _on_device(v, device) for k, v in value.items()}
    return value


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _call(training: bool) -> str:
    return "train()" if training else "eval()"

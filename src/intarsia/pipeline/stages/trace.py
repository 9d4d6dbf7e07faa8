"""A model as one trainable graph, whose tensors have the model's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from intarsia.errors import CaptureError
from intarsia.graph.line import Line, training_line
from intarsia.graph.nodes import changed_values, memory_of
from intarsia.pipeline.stages.export import export_model
from intarsia.pipeline.stages.signature import (
    Axes,
    BatchDims,
    CallSignature,
    Fixed,
    TensorSpec,
    batch_axes,
    needs_its_batch,
    shape_of,
    tensor_spec,
)


@dataclass(frozen=True)
class State:
    """A tensor of the model, with all its names (several if weights are tied)."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    persistent: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def bytes(self) -> int:
        """The bytes of the tensor."""
        return self.tensor.nbytes


@dataclass(frozen=True)
class Trace:
    """The captured graph, its states by placeholder, and its signature."""

    graph: fx.Graph
    module: fx.GraphModule  # has the bodies of higher-order operators
    states: Mapping[fx.Node, State]
    inputs: tuple[fx.Node, ...]
    signature: CallSignature
    training: bool
    same: Mapping[Any, Any]  # the symbols of the batch, and the symbol that replaces all of them
    checkpointed: tuple[str, ...] = ()  # modules that the model itself recomputes for their gradient

    @cached_property
    def line(self) -> Line:
        """The graph as a line of nodes that may be cut."""
        return training_line(self.graph, {n: s.tensor.requires_grad for n, s in self.states.items()})

    def changed_buffers(self) -> tuple[str, ...]:
        """The names of the buffers that a forward pass changes."""
        names = set()
        for node in self.line.nodes:
            roots = {root for value in changed_values(node) for root in memory_of(value)}
            names |= {self.states[root].name for root in roots if root in self.states}
        return tuple(sorted(names))

    def spec(self, node: fx.Node) -> TensorSpec:
        """The spec of a node's tensor."""
        return tensor_spec(node.name, node.meta["val"], self.same)

    def arguments(
        self,
        input_of: Callable[[fx.Node], Any],
        state_of: Callable[[fx.Node, torch.Tensor], Any],
    ) -> list[Any]:
        """The arguments of the graph: a value for each placeholder, an input or a state."""
        return [
            state_of(node, self.states[node].tensor) if node in self.states else input_of(node)
            for node in self.graph.find_nodes(op="placeholder")
        ]

    def fakes(self, mode: FakeTensorMode, lengths: Mapping[str, int]) -> list[Any]:
        """Fake arguments of the graph, for inputs of these lengths."""

        def empty(node: fx.Node) -> Any:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(self.spec(node).sizes(lengths), dtype=value.dtype, device=value.device)

        return self.arguments(empty, lambda _, tensor: mode.from_tensor(tensor, static_shapes=True))

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that the model returns, in order of its tensor outputs."""
        (values,) = self.graph.output_node().args
        assert isinstance(values, tuple | list)
        return tuple(v for v in values if isinstance(v, fx.Node))


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_shapes: Any = None,
    batch_dims: BatchDims | None = None,
) -> Trace:
    """Capture `model`, with a dynamic batch if possible, or with the sizes of `dynamic_shapes`.

    >>> t = trace(nn.Linear(2, 3), (torch.randn(4, 2),))
    >>> [n.name for n in t.line.nodes]
    ['linear']
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    axes, stated = batch_axes(model, args, kwargs, batch_dims)
    program, checkpointed = export_model(model, args, kwargs, axes if dynamic_batch else [], dynamic_shapes)
    specs = program.graph_signature.input_specs
    placeholders = program.graph.find_nodes(op="placeholder")
    states: dict[fx.Node, State] = {}
    inputs: list[fx.Node] = []
    entries: list[TensorSpec | Fixed] = []
    names = tensor_names(model)
    states_by_id: dict[int, State] = {}
    for node, spec in zip(placeholders, specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, ConstantArgument) or not isinstance(node.meta["val"], torch.Tensor):
                value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else node.meta["val"]
                if node.users:
                    raise CaptureError(f"input {node.name} is not a tensor and the graph computes with it")
                entries.append(Fixed(node.name, value))
                continue
            inputs.append(node)
            entries.append(tensor_spec(node.name, node.meta["val"]))
        elif spec.kind is InputKind.CONSTANT_TENSOR and not node.users:
            continue
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            states[node] = _state(program, names, spec.target, bool(spec.persistent), states_by_id)
        else:
            raise CaptureError(f"the graph reads {spec.target!r}, a {spec.kind.name.lower()}")
    axes = _checked_axes(model, args, kwargs, axes, stated, entries)
    same = _same_symbols(entries, axes)
    signature = _signature(model, program, entries, args, kwargs, axes, same)
    return Trace(
        program.graph,
        program.graph_module,
        states,
        tuple(inputs),
        signature,
        model.training,
        same,
        checkpointed,
    )


def _checked_axes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axes: Axes,
    stated: Sequence[bool],
    entries: Sequence[TensorSpec | Fixed],
) -> Axes:
    """The axes, without those that the graph fixes, and those with the length of the batch by chance."""
    checked = list(axes)
    batch: Any = None
    for i, (entry, axis) in enumerate(zip(entries, axes, strict=True)):
        if axis is None or not isinstance(entry, TensorSpec):
            continue
        length = entry.shape[axis]
        if batch is None or length == batch:
            batch = length
        elif isinstance(length, int):
            if stated[i]:
                raise CaptureError(
                    f"batch_dims gives axis {axis} of {entry}, which the model fixes at {length}"
                )
            checked[i] = None
        elif not stated[i] and not needs_its_batch(model, args, kwargs, axes, i):
            checked[i] = None
    return checked


def _same_symbols(entries: Sequence[TensorSpec | Fixed], axes: Axes) -> dict[Any, Any]:
    symbols = [
        entry.symbols[axis]
        for entry, axis in zip(entries, axes, strict=True)
        if axis is not None and isinstance(entry, TensorSpec) and isinstance(entry.shape[axis], str)
    ]
    return {symbol: symbols[0] for symbol in symbols if symbol != symbols[0]}


def tensor_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter and buffer, by its id."""
    names: dict[int, list[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, value in kind(remove_duplicate=False):
            names.setdefault(id(value), []).append(name)
    return names


def _state(
    program: ExportedProgram,
    names: dict[int, list[str]],
    target: str,
    persistent: bool,
    states_by_id: dict[int, State],
) -> State:
    tensor = program.state_dict.get(target)
    if tensor is None:
        tensor = program.constants[target]
    if not isinstance(tensor, torch.Tensor):
        raise CaptureError(f"the graph reads {target!r}, which is a {type(tensor).__name__}")
    # Tied weights are one state; the graph may read it under any of its names.
    return states_by_id.setdefault(
        id(tensor), State(tensor, tuple(names.get(id(tensor), [target])), persistent)
    )


def _signature(
    model: nn.Module,
    program: ExportedProgram,
    entries: Sequence[TensorSpec | Fixed],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axes: Axes,
    same: Mapping[Any, Any],
) -> CallSignature:
    (values,) = program.graph.output_node().args
    outputs: list[TensorSpec | Fixed] = []
    for i, value in enumerate(values):
        if not isinstance(value, fx.Node):
            outputs.append(Fixed(f"output {i}", value))
        elif isinstance(value.meta["val"], torch.Tensor):
            outputs.append(tensor_spec(value.name, value.meta["val"], same))
        else:
            raise CaptureError(f"output {i} is {value.meta['val']!r}, a number that changes with the input")
    ranges = {
        str(symbol): (
            int(r.lower) if r.lower.is_Integer else 0,  # a number read from data has no lower bound
            int(r.upper) if r.upper.is_Integer else 2**62,
        )
        for symbol, r in program.range_constraints.items()
    }
    example: dict[str, int] = {}
    inputs: list[TensorSpec | Fixed] = []
    batch: Any = None
    for entry, leaf, axis in zip(entries, pytree.tree_leaves((args, kwargs)), axes, strict=True):
        if isinstance(entry, Fixed):
            inputs.append(entry)
            continue
        example.update({d: n for d, n in zip(entry.shape, leaf.shape, strict=True) if isinstance(d, str)})
        symbols = tuple(d if isinstance(d, int) else d.subs(same) for d in entry.symbols)
        spec = TensorSpec(entry.name, shape_of(symbols) or entry.shape, entry.dtype, symbols)
        inputs.append(spec)
        if axis is not None and batch is None:
            batch = spec.shape[axis]
    for alias, symbol in same.items():
        pairs = [ranges.get(str(s), (0, 2**62)) for s in (alias, symbol)]
        ranges[str(symbol)] = (max(low for low, _ in pairs), min(high for _, high in pairs))
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    return CallSignature(
        inputs=tuple(inputs),
        in_spec=in_spec,
        out_spec=out_spec,
        outputs=tuple(outputs),
        batch=batch,
        ranges=ranges,
        example=example,
        axes={e.name: axis for e, axis in zip(entries, axes, strict=True) if isinstance(e, TensorSpec)},
        same={str(alias): str(symbol) for alias, symbol in same.items()},
        forward=inspect.signature(model.forward),
    )

"""One stage of a cut model: a module with its part of the weights, under the model's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from intarsia.errors import InputError, PartitionError, near_names
from intarsia.graph.nodes import memory_of
from intarsia.graph.piece import Piece, pieces_at, relayed
from intarsia.pipeline.gpipe.batchnorm import DeferredBatchNorm
from intarsia.pipeline.gpipe.checkpoint import is_recomputing
from intarsia.pipeline.stages.export import is_token_mean
from intarsia.pipeline.stages.program import (
    Draws,
    keyed_program,
    module_names,
    number_draws,
    recomputed_program,
    retarget,
)
from intarsia.pipeline.stages.signature import TensorSpec, value_name
from intarsia.pipeline.stages.trace import State, Trace

_MODES = {True: ("training", "train()"), False: ("evaluation", "eval()")}


class NamedStage(nn.Module):
    """A module with parts of a model under the model's names, which may equal those of its own attributes.

    A model may call a child `states` or `answer`. So parts are registered and read past the attributes.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, also one that has the name of a part."""
        registers = isinstance(value, nn.Module | nn.Parameter)  # FSDP sets parameters
        super().__setattr__(name, value) if registers else object.__setattr__(self, name, value)

    def graft_tensor(self, name: str, tensor: torch.Tensor | None, persistent: bool) -> None:
        """Register a parameter or buffer under a dotted name; missing modules are created."""
        module, leaf = self._holder(name)
        if isinstance(tensor, nn.Parameter):
            module._parameters[leaf] = tensor
            return
        module._buffers[leaf] = tensor
        if not persistent:
            module._non_persistent_buffers_set.add(leaf)

    def graft_module(self, name: str, module: nn.Module) -> None:
        """Register a module under a dotted name; missing modules are created."""
        holder, leaf = self._holder(name)
        holder._modules[leaf] = module

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            child = module._modules.get(part)
            if child is None:
                child = module._modules[part] = nn.Module()
                child.training = self.training
            module = child
        return module, leaf


def part_of(module: nn.Module, name: str) -> Any:
    """The child, parameter or buffer of a module; an attribute only if none of these has the name."""
    for registered in (module._modules, module._parameters, module._buffers):
        if name in registered:
            return registered[name]
    return getattr(module, name)


def part_at(module: nn.Module, path: str) -> Any:
    """The part of a module under a dotted name; the module itself for an empty one."""
    return reduce(part_of, filter(None, path.split(".")), module)


@dataclass(frozen=True)
class StageForm:
    """The inputs, outputs and states of a stage. Values have the names of their nodes.

    A value that only later stages need passes through the stage.
    """

    takes: tuple[TensorSpec | str, ...]  # a tensor, or the name of a number
    gives: tuple[TensorSpec | str, ...]
    arguments: tuple[str, ...]  # the arguments of the stage's program: inputs and states
    results: tuple[str, ...]  # the results of the program
    states: Mapping[str, str]  # the states among the arguments, with their names in the model
    written: frozenset[str]  # states that the program changes in place
    copied: frozenset[str]  # results in the memory of such a state, which the next micro-batch overwrites
    nodes: tuple[str, ...]
    draws: Mapping[str, Draws]  # of all nodes of the model, so that all stages have the same numbers
    checkpointed: tuple[str, ...]  # modules that the model itself recomputes


class Stage(NamedStage):
    """A stage that runs a piece of the captured graph.

    Its parameters are the model's own objects, and its `state_dict` has the model's keys. The graph is valid
    for one mode, training or evaluation; in the other mode, the stage raises InputError.
    """

    def __init__(
        self, program: fx.GraphModule, form: StageForm, states: Iterable[State], training: bool
    ) -> None:
        super().__init__()
        for state in states:
            for name in state.names:
                self.graft_tensor(name, state.tensor, state.persistent)
        # Not registered: the program has no tensor, and its name must not be in the keys of state_dict.
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "form", form)
        self.not_recomputed: str = ""  # why the model's own gradient checkpointing has no effect
        try:
            self.recompute(())
        except PartitionError as error:
            self.not_recomputed = str(error)
            object.__setattr__(self, "runner", keyed_program(program, form.draws))
        object.__setattr__(self, "captured_training", training)
        self.training = training

    program: fx.GraphModule
    # The program, with nodes that draw by key, and parts that are recomputed for their gradient.
    runner: nn.Module
    form: StageForm
    captured_training: bool

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """The values of the border after the stage, from those of the border before it."""
        if self.training != self.captured_training:
            captured, _ = _MODES[self.captured_training]
            present, call = _MODES[self.training]
            raise InputError(
                f"this stage was cut in {captured} mode and cannot run in {present} mode: dropout and batch"
                f" norm are fixed in the graph; split the model again after model.{call}"
            )
        form = self.form
        scope = dict(zip(map(value_name, form.takes), values, strict=True))
        scope |= self.states()
        if is_recomputing():  # the first run has updated the statistics
            scope |= {name: scope[name].clone() for name in form.written & form.states.keys()}
        results = self.runner(*(scope[name] for name in form.arguments))
        scope.update(zip(form.results, results, strict=True))
        scope |= {name: scope[name].clone() for name in form.copied}
        return tuple(scope[value_name(spec)] for spec in form.gives)

    def states(self) -> dict[str, torch.Tensor]:
        """The present tensors that the program reads.

        Every pass calls this, so each module is looked up only once, not for each of its tensors.
        """
        holders: dict[str, nn.Module] = {"": self}

        def holder(path: str) -> nn.Module:
            if path not in holders:
                above, _, name = path.rpartition(".")
                holders[path] = holder(above)._modules[name]  # type: ignore[assignment]
            return holders[path]

        states = {}
        for node, path in self.form.states.items():
            above, _, name = path.rpartition(".")
            states[node] = part_of(holder(above), name)
        return states

    @property
    def writes(self) -> bool:
        """Whether a forward pass changes buffers."""
        return bool(self.form.states.keys() & self.form.written)

    @property
    def mean_node(self) -> str | None:
        """The node that computes a mean over tokens, if there is one."""
        nodes = self.program.graph.nodes
        return next((n.name for n in nodes if is_token_mean(n.target, n.args, n.kwargs)), None)

    @property
    def reuses_weights(self) -> bool:
        """Whether a parameter, or a value computed only from parameters, has more than one use."""
        graph, states = self.program.graph, self.states()
        placeholders = graph.find_nodes(op="placeholder")
        uses: Counter[int] = Counter()
        own: dict[fx.Node, int] = {}  # the id of the parameter, which tied weights share
        for node, name in zip(placeholders, self.form.arguments, strict=True):
            if name in states:
                own[node] = id(states[name]) if isinstance(states[name], nn.Parameter) else 0
        for node in graph.nodes:
            sources = [own[value] for value in node.all_input_nodes if value in own]
            if node.op == "call_function" and len(sources) == len(node.all_input_nodes):
                own[node] = id(node) if any(sources) else 0
        for node, source in own.items():
            uses[source] += len(node.users) if source else 0
        return any(count > 1 for count in uses.values())

    def to_device(self, device: torch.device | str) -> Stage:
        """Move the weights, and the devices in the graph (of `arange`, `zeros`), to `device`."""
        target = torch.device(device)
        for program in {self.program, self.runner}:
            retarget(program, target)
        return self.to(target)

    def recompute(self, names: Sequence[str]) -> None:
        """Recompute these modules in the backward pass, and those that the model itself recomputes."""
        if not self.not_recomputed:
            names = [*self.form.checkpointed, *names]
        states = {node: state.requires_grad for node, state in self.states().items()}
        written, draws = self.form.written, self.form.draws
        object.__setattr__(self, "runner", recomputed_program(self.program, states, written, names, draws))

    def extra_repr(self) -> str:
        """The values at both borders."""
        sides = (", ".join(map(str, side)) for side in (self.form.takes, self.form.gives))
        return " -> ".join(f"({side})" for side in sides)


def recompute_modules(stages: Iterable[nn.Module], names: Sequence[str]) -> None:
    """Recompute the modules with these names or patterns. Raises PartitionError for a name without module."""
    if isinstance(names, str):
        raise PartitionError(f"checkpoint={names!r} is one name; give a list of them")
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise PartitionError(f"checkpoint={names!r} is not a list of modules' names")
    paths: set[str] = set()
    for stage in stages:
        if not isinstance(stage, Stage):
            raise PartitionError(
                "checkpoint= names modules, which works in stages cut by the graph; these stages are cut"
                " along modules: use torch.utils.checkpoint in the model"
            )
        paths |= module_names(stage.program)
        stage.recompute(names)
    for name in names:
        if not any(fnmatchcase(path, name) for path in paths):
            hint = near_names(name, paths)
            raise PartitionError(f"checkpoint names {name!r}, which is not a module of the graph{hint}")


def build_stages(trace: Trace, places: Sequence[int]) -> list[Stage]:
    """The stages of the traced graph, cut at `places`."""
    pieces = pieces_at(trace.module, trace.line, places)
    borders = relayed(pieces, trace.inputs, trace.results, trace.states)
    draws = number_draws(trace.graph)
    forms = [_form(trace, piece, draws, *border) for piece, border in zip(pieces, borders, strict=True)]
    homes = [[trace.states[n] for n in trace.states if n.name in form.states] for form in forms]
    used = {id(state) for home in homes for state in home}
    homes[0] += [s for s in trace.states.values() if id(s) not in used]  # states that no stage reads
    return [
        Stage(piece.module, form, dict.fromkeys(home), trace.training)
        for piece, form, home in zip(pieces, forms, homes, strict=True)
    ]


def _form(
    trace: Trace,
    piece: Piece,
    draws: Mapping[str, Draws],
    takes: Sequence[fx.Node],
    gives: Sequence[fx.Node],
) -> StageForm:
    written = trace.line.written
    states = {n.name: trace.states[n].name for n in {*piece.inputs, *gives} if n in trace.states}
    held = {n for n in trace.states if n in written}
    last = list(gives) == list(trace.results)
    return StageForm(
        takes=tuple(_describe(trace, n) for n in takes),
        gives=tuple(_describe(trace, n) for n in gives),
        arguments=tuple(n.name for n in piece.inputs),
        results=tuple(n.name for n in piece.outputs),
        states=states,
        written=frozenset(n.name for n in held),
        copied=frozenset(n.name for n in piece.outputs if not last and memory_of(n) & held),
        nodes=tuple(n.name for n in piece.graph.nodes),
        draws=draws,
        checkpointed=trace.checkpointed,
    )


def _describe(trace: Trace, node: fx.Node) -> TensorSpec | str:
    return trace.spec(node) if isinstance(node.meta["val"], torch.Tensor) else node.name


_BATCH_NORM, _COUNT = torch.ops.aten.batch_norm.default, torch.ops.aten.add_.Tensor


class DeferredNode(DeferredBatchNorm):
    """Replaces `aten.batch_norm` in training in a graph."""

    def forward(  # type: ignore[override]
        self, input: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor
    ) -> Tensor:
        """The result of batch norm; the last micro-batch updates the statistics."""
        # The stage owns the states and passes them in every call, since they may move to another device.
        self._parameters.update(weight=weight, bias=bias)
        self._buffers.update(running_mean=mean, running_var=variance)
        return super().forward(input)


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


Deferred = DeferredNode | DeferredCount


class _Deferring(fx.GraphModule):
    """A stage's program with deferred nodes."""


def defer_statistics(stages: Iterable[nn.Module], deferred: bool) -> list[Deferred]:
    """Set whether the batch norms of stages update their running statistics once per batch (`deferred`).

    Returns the deferred modules, whose `begin` starts a batch. Each micro-batch is normalized by its own
    statistics in both cases.
    """
    norms: list[Deferred] = []
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


def _defer(stage: Stage) -> list[Deferred]:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in stage.program.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    program = _Deferring(stage.program, graph)
    form = stage.form
    placeholders = graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, form.arguments, strict=True)
    states = {node: form.states[name] for node, name in pairs if name in form.states}
    norms: list[Deferred] = []
    for node in list(graph.nodes):
        state = states.get(node.args[3 if node.target is _BATCH_NORM else 0]) if node.args else None
        if node.target is _BATCH_NORM and node.args[5] and state is not None:
            momentum, eps = node.args[6:8]
            deferred: Deferred = DeferredNode(1, eps, momentum, affine=False)
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

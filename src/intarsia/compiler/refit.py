"""Refit: new weights for a compiled module.

The captured program is lowered again with the new weights, and cut and built as before. Passes and engines
use the values of weights, so replacing weights in built programs would need the origin of every folded value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from intarsia.build.judge import Example, Judge, LoweredModel, judged_example
from intarsia.capture.export import capture
from intarsia.capture.input import honest_sizes
from intarsia.convert import registry
from intarsia.errors import RefitError, some_of
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.plan import Plan
from intarsia.lower import Lowered, lower
from intarsia.lower.lowered import example_inputs
from intarsia.partition import PartitionOptions, Segment, Strategy, SupportTable
from intarsia.runtime.compiled import Compiled, Weights

State = dict[str, torch.Tensor]


class Rebuild(Protocol):
    """What a refit needs of the compile job."""

    def rebuild(
        self, model: nn.Module | None, lowered: Lowered, examples: Sequence[Example], plans: Sequence[Plan]
    ) -> Compiled: ...

    def mismatch(self, judge: Judge, graph: LoweredModel, compiled: Compiled) -> str | None: ...


class Refit:
    """Builds the module again with other weights, and compares it with the model if one is given."""

    def __init__(self, job: Rebuild, examples: Sequence[Example]) -> None:
        self._job = job
        self._calls = [example.call for example in examples]
        self._is_comparable = all(e.truth is not None for e in examples)  # false if it draws random numbers
        # The plans of the compile, not of the last refit: those weights may have excluded an engine.
        self._plans: list[Plan] = []

    def __call__(self, old: Compiled, weights: Weights) -> Compiled:
        state = new_state(old.state_dict(), weights)
        model = weights if isinstance(weights, nn.Module) else None
        lowered = relowered(old.lowered, state, model)
        self._plans = self._plans or [old.plan, *old.body_plans.values()]
        examples = [Example(call, example_inputs(lowered, *call)) for call in self._calls]
        compiled = self._job.rebuild(model, lowered, examples, self._plans)
        compiled.refit_from(old, state)
        if model is not None and self._is_comparable:
            judge = Judge(model)
            judged = [judged_example(judge, lowered, example) for example in examples]
            mismatch = self._job.mismatch(judge, LoweredModel(lowered, judged), compiled)
            if mismatch is not None:
                raise RefitError(
                    f"with these weights the compiled module {mismatch}; compile the model again"
                )
        compiled.refit_by(self)
        return compiled


def new_state(old: Mapping[str, torch.Tensor], weights: Mapping[str, Any] | nn.Module) -> State:
    """The weights by name, checked against the old ones: names, shapes, dtypes and devices are equal.

    Those of a model are shared with it, and watched. Those of a state dict are copied, since nothing watches
    it.
    """
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    missing = [name for name in old if name not in state]
    unknown = [name for name in state if name not in old]
    for names, what in ((missing, "lack"), (unknown, "have, unlike the model,")):
        if names:
            raise RefitError(f"the new weights {what} {some_of(names)}")
    for name, tensor in old.items():
        new = state[name]
        if not isinstance(new, torch.Tensor):
            raise RefitError(f"{name} is a {type(new).__name__}, not a tensor")
        for attribute in ("shape", "dtype", "device"):
            if getattr(new, attribute) != getattr(tensor, attribute):
                raise RefitError(
                    f"{name} has the {attribute} {getattr(new, attribute)};"
                    f" the compiled one has {getattr(tensor, attribute)}"
                )
    shared = isinstance(weights, nn.Module)
    return {name: state[name].detach() if shared else state[name].detach().clone() for name in old}


def relowered(old: Lowered, state: State, model: nn.Module | None) -> Lowered:
    """The captured program, lowered with other weights; RefitError if that changes the graph.

    Constants and masks are folded again from the new weights. Nothing is captured.
    """
    if old.program is None:
        raise RefitError("the module does not hold its captured program; compile the model again")
    program = capture(old.program)  # type: ignore[arg-type]  # a copy, which gets the new weights
    for name, tensor in program.state_dict.items():
        if name in state:
            is_parameter = isinstance(tensor, nn.Parameter)
            program.state_dict[name] = (
                nn.Parameter(state[name], tensor.requires_grad) if is_parameter else state[name]
            )
    unsaved = {} if model is None else dict(model.named_buffers())  # buffers that a state dict leaves out
    for table in (program.constants, program.state_dict):  # a program from a file has both in the latter
        for name, constant in table.items():
            new = unsaved.get(name) if name not in state else None
            if new is not None and (new.shape, new.dtype) == (constant.shape, constant.dtype):
                table[name] = new
    with honest_sizes():
        lowered = lower(program, has_converter=registry.__contains__)
    difference = _difference(old.module, lowered.module) or _changed_interface(old, lowered)
    if difference is not None:
        raise RefitError(f"with these weights the model has another graph ({difference}): compile it again")
    return replace(
        lowered,
        module=_named_like(old.module, lowered.module),
        inputs=old.inputs,
        outputs=old.outputs,
        in_spec=old.in_spec,
        out_spec=old.out_spec,
        input_names=old.input_names,
        guards=old.guards,
        notes=(),
        views=lowered.views if old.views else (),
        layouts=old.layouts,
    )


def _named_like(old: fx.GraphModule, new: fx.GraphModule) -> fx.GraphModule:
    """The new graph with the node names and source lines of the old one.

    Plans identify nodes by name, and torch renames the nodes of a program that was read from a file.
    """
    pairs = [(a, b) for a, b in zip(_steps(old), _steps(new), strict=True) if a.op == "call_function"]
    for a, b in pairs:
        b.meta.update({key: a.meta[key] for key in ("nn_module_stack", "stack_trace") if key in a.meta})
    for name, body in list(new.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(new, name, _named_like(getattr(old, name), body))
    if all(a.name == b.name for a, b in pairs):
        return new
    names, graph = {b: a.name for a, b in pairs}, fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in new.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copied.__getitem__)
        name = names.get(node, node.name)
        copied[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copied[node].meta = dict(node.meta)
        if copied[node].name != name:
            raise RefitError(f"the graph has two nodes {name}; compile the model again")
    module = fx.GraphModule(new, graph)
    module.meta = dict(new.meta)
    return module


def _changed_interface(old: Lowered, new: Lowered) -> str | None:
    before, after = ([(i.index, i.buffer, i.is_constant) for i in x.inputs] for x in (old, new))
    if before != after:
        return "it takes other inputs"
    return None if old.outputs == new.outputs else "it gives other results"


def _difference(old: fx.GraphModule, new: fx.GraphModule) -> str | None:
    one, other = _steps(old), _steps(new)
    if len(one) != len(other):
        return f"{len(other)} nodes, not {len(one)}"
    # Inputs and constants may have another name or place, so they are numbered by their first reader.
    numbers: list[dict[fx.Node, int]] = [{}, {}]
    for a, b in zip(one, other, strict=True):
        is_named = a.op == "call_function"
        if a.op != b.op or (is_named and str(a.target) != str(b.target)):
            return f"{b.name} in place of {a.name}"
        if _arguments(a, numbers[0]) != _arguments(b, numbers[1]):
            return f"{b.name} has other arguments"
    inner = {name: module for name, module in old.named_children() if isinstance(module, fx.GraphModule)}
    for name, body in inner.items():
        other_body = getattr(new, name, None)
        if not isinstance(other_body, fx.GraphModule):
            return f"no body {name}"
        difference = _difference(body, other_body)
        if difference is not None:
            return difference
    return None


def _steps(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op != "get_attr"]


def _arguments(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    """The arguments of a node as text; nodes are numbered in the order of their first use."""
    own = numbers.setdefault(node, len(numbers))
    arguments = fx.map_arg(
        (node.args, dict(node.kwargs)), lambda n: f"%{numbers.setdefault(n, len(numbers))}"
    )
    return f"%{own} {arguments}"


def same_cuts(plans: Iterable[Plan], otherwise: Strategy) -> Strategy:
    """A strategy that cuts a graph as one of these plans does, by the names of its nodes.

    If no plan fits the graph, or an engine refuses a node that the plan gives it, `otherwise` cuts it.
    """
    by_names = {frozenset(node.name for node in plan.nodes): plan for plan in plans}

    def strategy(module: fx.GraphModule, table: SupportTable, options: PartitionOptions) -> Plan:
        nodes = {node.name: node for node in module.graph.nodes}
        plan = by_names.get(frozenset(node.name for node in compute_nodes(module.graph)))
        if plan is None:
            return otherwise(module, table, options)
        segments = [_segment_of(segment, nodes) for segment in plan.segments]
        if not all(table.accepts(node, segment.engine) for segment in segments for node in segment.nodes):
            return otherwise(module, table, options)
        return Plan(tuple(segments), plan.strategy)

    return strategy


def _segment_of(segment: Segment, nodes: Mapping[str, fx.Node]) -> Segment:
    """The same segment of another graph, whose nodes have the same names."""
    return replace(
        segment,
        nodes=tuple(nodes[node.name] for node in segment.nodes),
        reasons={nodes[node.name]: why for node, why in segment.reasons.items()},
        recomputed=tuple(nodes[node.name] for node in segment.recomputed),
    )

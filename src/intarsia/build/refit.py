"""New weights for a module that is compiled already: lowered once more, cut as before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from intarsia.capture.export import capture
from intarsia.capture.input import honest_sizes
from intarsia.errors import RefitError
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.plan import Plan
from intarsia.lower import Lowered, lower
from intarsia.lower.generalize import HasConverter
from intarsia.partition import PartitionOptions, Segment, Strategy, SupportTable

State = dict[str, torch.Tensor]


def new_state(old: Mapping[str, torch.Tensor], given: Mapping[str, Any] | nn.Module) -> State:
    """The weights given, checked to be those of the model in name, shape, dtype and device.

    A model's own are shared with it; those of a state dict are copied, since nobody watches over them.
    """
    found = given.state_dict() if isinstance(given, nn.Module) else given
    missing = [name for name in old if name not in found]
    unknown = [name for name in found if name not in old]
    for names, what in ((missing, "lack"), (unknown, "have, unlike the model,")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RefitError(f"the new weights {what} {', '.join(map(str, names[:3]))}{more}")
    for name, tensor in old.items():
        new = found[name]
        if not isinstance(new, torch.Tensor):
            raise RefitError(f"{name} is a {type(new).__name__}, not a tensor")
        is_like = [
            (part, getattr(new, part), getattr(tensor, part))
            for part in ("shape", "dtype", "device")
            if getattr(new, part) != getattr(tensor, part)
        ]
        for part, has, wanted in is_like:
            raise RefitError(f"{name} has the {part} {has}; the compiled one has {wanted}")
    shared = isinstance(given, nn.Module)
    return {name: found[name].detach() if shared else found[name].detach().clone() for name in old}


def relowered(old: Lowered, state: State, model: nn.Module | None, has_converter: HasConverter) -> Lowered:
    """The graph with other weights; RefitError where it is another graph then.

    Constants are folded, and what they prove is proven, from the new weights. Nothing is captured.
    """
    if old.program is None:
        raise RefitError(
            "a module that was loaded from a file has not kept the program it was made of; compile the model"
            " with its new weights, and save that"
        )
    program = capture(old.program)  # type: ignore[arg-type]  # a copy, whose weights are put in here
    for name, tensor in program.state_dict.items():
        if name in state:
            is_parameter = isinstance(tensor, nn.Parameter)
            program.state_dict[name] = (
                nn.Parameter(state[name], tensor.requires_grad) if is_parameter else state[name]
            )
    unsaved = {} if model is None else dict(model.named_buffers())  # buffers that a state dict leaves out
    for name, constant in program.constants.items():
        new = unsaved.get(name)
        if new is not None and (new.shape, new.dtype) == (constant.shape, constant.dtype):
            program.constants[name] = new
    with honest_sizes():
        made = lower(program, has_converter=has_converter)
    difference = _difference(old.module, made.module)
    if difference is not None:
        raise RefitError(
            f"with these weights the model has another graph ({difference}): what was proven of the old ones"
            " does not hold; compile it again"
        )
    return replace(made, guards=old.guards, notes=())


def _difference(old: fx.GraphModule, new: fx.GraphModule) -> str | None:
    one, other = list(old.graph.nodes), list(new.graph.nodes)
    if len(one) != len(other):
        return f"{len(other)} nodes, not {len(one)}"
    for a, b in zip(one, other, strict=True):
        if (a.op, a.name) != (b.op, b.name) or str(a.target) != str(b.target):
            return f"{b.name} in place of {a.name}"
        if str(a.args) != str(b.args) or str(a.kwargs) != str(b.kwargs):
            return f"{b.name} has other arguments"
    inner = {name: module for name, module in old.named_children() if isinstance(module, fx.GraphModule)}
    for name, body in inner.items():
        found = getattr(new, name, None)
        if not isinstance(found, fx.GraphModule):
            return f"no body {name}"
        difference = _difference(body, found)
        if difference is not None:
            return difference
    return None


def as_before(plans: Iterable[Plan], otherwise: Strategy) -> Strategy:
    """A strategy that cuts graphs as these plans cut equal ones, by the names of their nodes.

    A graph that none of them fits, or a node that its engine refuses by now, is cut by the other strategy.
    """
    by_names = {frozenset(node.name for node in plan.nodes): plan for plan in plans}

    def strategy(module: fx.GraphModule, table: SupportTable, options: PartitionOptions) -> Plan:
        nodes = {node.name: node for node in module.graph.nodes}
        plan = by_names.get(frozenset(node.name for node in compute_nodes(module.graph)))
        if plan is None:
            return otherwise(module, table, options)
        segments = [_renewed(segment, nodes) for segment in plan.segments]
        if not all(table.accepts(node, segment.engine) for segment in segments for node in segment.nodes):
            return otherwise(module, table, options)
        return Plan(tuple(segments), plan.strategy)

    return strategy


def _renewed(segment: Segment, nodes: Mapping[str, fx.Node]) -> Segment:
    return replace(
        segment,
        nodes=tuple(nodes[node.name] for node in segment.nodes),
        reasons={nodes[node.name]: why for node, why in segment.reasons.items()},
        recomputed=tuple(nodes[node.name] for node in segment.recomputed),
    )

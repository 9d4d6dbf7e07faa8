"""The lowered graph: functional ATen, weights as attributes, a flat list of inputs and of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.errors import some_of
from intarsia.lower.result_memory import IN_ROWS, Layouts, OutputView


class Role(Enum):
    """What happens to an output of the graph."""

    USER = "returned to the caller"
    BUFFER = "written back to a buffer"
    INPUT = "written back to an input"


@dataclass(frozen=True)
class GraphInput:
    """One flat input: an argument (`index` in the flattened call) or a buffer that the model changes."""

    name: str
    index: int | None = None
    buffer: str | None = None
    constant: Any = None
    is_constant: bool = False


@dataclass(frozen=True)
class GraphOutput:
    """One flat output; `target` names the buffer or input that it is written to.

    `is_input`: the output is an input itself. `twin`: the output is the same tensor as the one at this place.
    """

    role: Role
    target: str | None = None
    constant: Any = None
    is_constant: bool = False
    is_input: bool = False
    twin: int | None = None


@dataclass(frozen=True)
class Lowered:
    """A functional graph, and how a call of the model maps to it."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    buffers: dict[str, torch.Tensor]
    input_names: tuple[str, ...]
    range_constraints: dict[Any, Any]
    guards: tuple[str, ...] = ()  # conditions on sizes that the graph assumes, as export writes them
    notes: tuple[str, ...] = ()  # for the user, on how the model was captured
    program: ExportedProgram | None = None  # the captured program, for a refit
    views: tuple[OutputView | None, ...] = ()  # for each of the user's results, how it shares memory
    layouts: Layouts = IN_ROWS  # the memory layouts of the user's results


def example_inputs(lowered: Lowered, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs of the graph for a call, in the order of its placeholders."""
    flat, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return [lowered.buffers[i.buffer] if i.buffer else flat[i.index or 0] for i in lowered.inputs]


# Operators that lowering replaced. Their names are kept at the nodes that replace them, for the user's
# options.

_KEY = "intarsia.replaces"


def note_replaced(node: fx.Node, targets: list[Any]) -> None:
    """Record the names of operators that a node replaces."""
    node.meta[_KEY] = tuple(dict.fromkeys([*node.meta.get(_KEY, ()), *map(str, targets)]))


def replaced_by(node: fx.Node) -> tuple[str, ...]:
    """The full names of the operators that a node replaces."""
    names: tuple[str, ...] = node.meta.get(_KEY, ())
    return names


def note_left(module: fx.GraphModule, what: str, left: Mapping[str, Sequence[str]]) -> None:
    """Add a note for the user for each reason why nodes of these names are not changed."""
    for reason, names in left.items():
        module.meta.setdefault("left", []).append(f"{what}: {some_of(names)}: {reason}")

"""The graph the partitioner sees: functional ATen, weights as attributes, a flat list in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.lower.output_views import IN_ROWS, Layouts, OutputView


class Role(Enum):
    """What an output of the graph is for."""

    USER = "returned to the caller"
    BUFFER = "written back to a buffer"
    INPUT = "written back to an input"


@dataclass(frozen=True)
class GraphInput:
    """One flat input: from the caller (`index` in the flattened call) or a buffer the model changes."""

    name: str
    index: int | None = None
    buffer: str | None = None
    constant: Any = None
    is_constant: bool = False


@dataclass(frozen=True)
class GraphOutput:
    """One flat output; `target` names the buffer or input it is written to.

    `is_input`: the model returns an input itself. `twin`: it returns one tensor twice, first at that place.
    """

    role: Role
    target: str | None = None
    constant: Any = None
    is_constant: bool = False
    is_input: bool = False
    twin: int | None = None


@dataclass(frozen=True)
class Lowered:
    """A functional graph, and how a call maps onto it."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    buffers: dict[str, torch.Tensor]
    input_names: tuple[str, ...]
    range_constraints: dict[Any, Any]
    guards: tuple[str, ...] = ()  # what else the graph takes for granted about sizes, as export writes it
    notes: tuple[str, ...] = ()  # what a user should know of how the model was captured
    program: ExportedProgram | None = None  # what it was made of, so that other weights can be put in
    views: tuple[OutputView | None, ...] = ()  # of the user's results, those that share memory in the model
    layouts: Layouts = IN_ROWS  # how the same lie in memory in the model


def example_inputs(lowered: Lowered, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What the graph is fed for an example call, in the order of its placeholders."""
    flat, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return [lowered.buffers[i.buffer] if i.buffer else flat[i.index or 0] for i in lowered.inputs]


# Operators that lowering replaced, kept with what took their place: users name what they wrote.

_KEY = "intarsia.replaces"


def note_replaced(node: fx.Node, targets: list[Any]) -> None:
    """Let a node answer to the names of the operators it stands for, besides its own."""
    node.meta[_KEY] = tuple(dict.fromkeys([*node.meta.get(_KEY, ()), *map(str, targets)]))


def replaced_by(node: fx.Node) -> tuple[str, ...]:
    """The full names of the operators that a node stands for."""
    names: tuple[str, ...] = node.meta.get(_KEY, ())
    return names


_NAMED = 3  # nodes in a note


def note_left(module: fx.GraphModule, what: str, left: Mapping[str, Sequence[str]]) -> None:
    """Leave a note for the user for each reason why nodes of these names stay as they are."""
    for reason, names in left.items():
        more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        notes = module.meta.setdefault("left", [])
        notes.append(f"{what}: {', '.join(names[:_NAMED])}{more}: {reason}")

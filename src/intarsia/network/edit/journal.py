"""What an edit did to a graph: enough to check it, and to take it back.

Nothing here uses private names of `onnx_ir`, and a test reads the sources for them. On a synthetic chain that
costs ten times the time; on BERT-base and Swin-T matching dominates, and nothing was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import onnx_ir as ir

from intarsia.network.bodies import OuterUse

ConstantKey = Hashable


class LayerAdded(NamedTuple):
    """A layer was added; `inferred` if the types of its outputs come from the operator's own rule."""

    node: ir.Node
    inferred: bool


class BodyTaken(NamedTuple):
    """A layer that was added took over the body of another, or of none."""

    body: ir.Graph
    before: ir.Node | None


class LayerRemoved(NamedTuple):
    """A layer was taken out; `released` is what its bodies read, `behind` the layer that was after it."""

    node: ir.Node
    inputs: tuple[ir.Value | None, ...]
    released: tuple[OuterUse, ...]
    behind: ir.Node | None


class UsesReplaced(NamedTuple):
    """All readers of `old` were given `new`; `outputs` are positions among the graph's outputs."""

    old: ir.Value
    new: ir.Value
    uses: tuple[tuple[ir.Node, int], ...]
    outputs: tuple[int, ...]


class InputReplaced(NamedTuple):
    """One layer reads `new` where it read `old`."""

    node: ir.Node
    position: int
    old: ir.Value | None
    new: ir.Value


class ConstantAdded(NamedTuple):
    """A constant was added, shared under `key` if it is small."""

    value: ir.Value
    key: ConstantKey | None


class InputAdded(NamedTuple):
    """An input of the graph was added."""

    value: ir.Value


class OutputMarked(NamedTuple):
    """A value was made an output of the graph; `name` is what it was called before."""

    value: ir.Value
    name: str | None


class TypeChanged(NamedTuple):
    """A value got another dtype or shape than these."""

    value: ir.Value
    type: ir.TypeProtocol | None
    shape: ir.Shape | None


class Reordered(NamedTuple):
    """The layers stood like this before their order changed."""

    nodes: list[ir.Node]


class RecordChanged(NamedTuple):
    """Something recorded about the graph was changed; `restore` puts back what it said."""

    restore: Callable[[], None]


Edit = (
    LayerAdded
    | BodyTaken
    | LayerRemoved
    | UsesReplaced
    | InputReplaced
    | ConstantAdded
    | InputAdded
    | OutputMarked
    | TypeChanged
    | Reordered
    | RecordChanged
)

"""Records of edits, with what is needed to check and to undo them.

This code uses no private names of `onnx_ir`, and a test checks that. A synthetic chain of edits takes ten
times as long with public names; on BERT-base and Swin-T matching takes most of the time, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import onnx_ir as ir

from intarsia.network.attributes import OuterUse

ConstantKey = Hashable


class LayerAdded(NamedTuple):
    """A layer was added; `inferred` if the types of its outputs come from the operator's own rule."""

    node: ir.Node
    inferred: bool


class BodyTaken(NamedTuple):
    """An added layer became the owner of a body; `before` was its owner, or None."""

    body: ir.Graph
    before: ir.Node | None


class LayerRemoved(NamedTuple):
    """A layer was removed. `released` are the reads of its bodies, `behind` was the layer after it."""

    node: ir.Node
    inputs: tuple[ir.Value | None, ...]
    released: tuple[OuterUse, ...]
    behind: ir.Node | None


class UsesReplaced(NamedTuple):
    """All readers of `old` now read `new`; `outputs` are positions among the graph's outputs."""

    old: ir.Value
    new: ir.Value
    uses: tuple[tuple[ir.Node, int], ...]
    outputs: tuple[int, ...]


class InputReplaced(NamedTuple):
    """One input of a layer was replaced."""

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
    """A value became an output of the graph; `name` is its former name."""

    value: ir.Value
    name: str | None


class TypeChanged(NamedTuple):
    """The dtype or shape of a value was changed; these are the former ones."""

    value: ir.Value
    type: ir.TypeProtocol | None
    shape: ir.Shape | None


class Reordered(NamedTuple):
    """The order of the layers was changed; this is the former one."""

    nodes: list[ir.Node]


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
)

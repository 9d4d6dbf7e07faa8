"""`as_strided` reads memory by strides, and engines keep their own: it is pinned to the traced layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intarsia.errors import LoweringError
from intarsia.lower.replaced import note_replaced

aten = torch.ops.aten

# These look at the memory of their first argument; a reshape may copy and so is not among them.
_VIEWS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.detach.default,
        aten.alias.default,
    }
)


def pin_strides(module: fx.GraphModule) -> None:
    """Let every `as_strided` read a flat vector that holds its base in the order it lay when traced.

    as_strided(view of base, size, stride, offset) = as_strided(flat, size, stride, offset), where flat is the
    base with its dimensions in order of memory, as one row. An input read this way must come with the
    strides it was traced with: `module.meta["strides"]` names them for the door to check.
    """
    module.meta["strides"] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is aten.as_strided.default:
            _pin(module, node)


def _pin(module: fx.GraphModule, node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    traced = source.meta["val"]
    given: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    offset = traced.storage_offset() if given is None else given
    base, views = source, []
    while base.op == "call_function" and base.target in _VIEWS:
        views.append(base.target)
        base = base.args[0]  # type: ignore[assignment]
    value = base.meta["val"]
    order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))
    packed = value.permute(order)
    if not packed.is_contiguous() or value.storage_offset() != 0:
        raise LoweringError(
            f"as_strided over {base.name}, whose elements do not lie side by side (strides {value.stride()}),"
            " cannot be compiled: what it reads between them is unknown"
        )
    if base.op == "placeholder":
        module.meta["strides"][base.name] = tuple(value.stride())
    with module.graph.inserting_before(node):
        ordered = module.graph.call_function(aten.permute.default, (base, order))
        ordered.meta = {**base.meta, "val": packed}
        flat = module.graph.call_function(aten.reshape.default, (ordered, [-1]))
        flat.meta = {**base.meta, "val": packed.reshape(-1)}
        note_replaced(ordered, views)
    node.args = (flat, node.args[1], node.args[2], offset)
    node.kwargs = {}

"""Nodes that depend on constants alone, and their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from intarsia.lower.purity import dequantizes, is_pure_operator

FLOATS_OF_8_BITS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_SHORT = frozenset({torch.int8, torch.uint8, torch.int32}) | FLOATS_OF_8_BITS


def constants_of(module: fx.GraphModule) -> dict[fx.Node, int]:
    """The nodes that depend on constants alone, with the bytes of the largest that holds integers."""
    known: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            held = getattr(module, str(node.target), None)
            if isinstance(held, torch.Tensor) and held.layout is torch.strided:
                known[node] = held.nbytes if held.dtype in _SHORT else 0
        elif node.op == "call_function" and all(source in known for source in node.all_input_nodes):
            target = node.target
            is_static = isinstance(value, torch.Tensor) and all(isinstance(s, int) for s in value.shape)
            pure = isinstance(target, torch._ops.OpOverload) and is_pure_operator(target)
            if is_static and pure and not dequantizes(target):
                known[node] = max((known[source] for source in node.all_input_nodes), default=0)
    return known


class Values:
    """The values of nodes that depend on constants alone, computed at each access."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module

    def of(self, node: fx.Node) -> torch.Tensor:
        """The value of a node. Each value that leads to it is released after its last use."""
        chain = sorted(behind(node))
        last = {source: one for one in chain for source in one.all_input_nodes}
        values: dict[fx.Node, Any] = {}
        for one in chain:
            if one.op == "get_attr":
                values[one] = getattr(self._module, str(one.target)).detach()
                continue
            args, kwargs = fx.map_arg((one.args, one.kwargs), values.__getitem__)
            with torch.no_grad():
                function: Any = one.target
                values[one] = function(*args, **kwargs)
            for source in one.all_input_nodes:
                if last[source] is one and source is not node:
                    del values[source]
        return values[node]  # type: ignore[no-any-return]

    def factor(self, arg: Any) -> torch.Tensor:
        """The value of an argument, which may be a number."""
        return self.of(arg) if isinstance(arg, fx.Node) else torch.tensor(arg)

    def held(self, node: fx.Node, content: torch.Tensor) -> torch.Tensor:
        """A constant of the model with the same bytes, if there is one; otherwise `content`."""
        for leaf in sorted(behind(node)):
            if leaf.op != "get_attr":
                continue
            own: torch.Tensor = getattr(self._module, str(leaf.target)).detach()
            if own.dtype in _SHORT and own.nbytes == content.nbytes and own.is_contiguous():
                alike = own.view(content.dtype).view(content.shape)
                if torch.equal(alike.view(torch.uint8), content.view(torch.uint8)):
                    return alike
        return content

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The values of a node's arguments, without the first."""
        return fx.map_arg((node.args[1:], node.kwargs), self.of)


def behind(node: fx.Node) -> Iterator[fx.Node]:
    """A node and all nodes that it is computed from, each once."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            yield one
            waiting += one.all_input_nodes

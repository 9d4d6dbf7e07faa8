"""The short way of making, placing and removing nodes leaves what the long way of `onnx_ir` leaves."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from intarsia.network import Network
from intarsia.network.edit import make
from intarsia.network.edit.remove import remove_dead


def test_the_installed_onnx_ir_allows_the_short_way() -> None:
    assert make.SHORT, "onnx_ir keeps other fields than make.py knows: rewriting is slower until it does"


def _fields(thing: Any, names: set[str]) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _shown(node: ir.Node) -> dict[str, Any]:
    """All that a node and its outputs hold, with other objects by name."""
    shown = _fields(node, make._NODE - {"_inputs", "_outputs", "_attributes", "_graph"})
    shown["inputs"] = [None if value is None else (value.name, len(value.uses())) for value in node.inputs]
    shown["attributes"] = [(name, attr.value) for name, attr in node.attributes.items()]
    shown["owner"] = node.attributes._owner is node
    shown["graph"] = None if node.graph is None else [n.name for n in node.graph]
    shown["outputs"] = [
        {
            **_fields(value, make._VALUE - {"_producer", "_uses", "_graph"}),
            "uses": len(value.uses()),
            "maker": value.producer() is node,
        }
        for value in node.outputs
    ]
    return shown


def _steps(domain: str, attributes: list[ir.Attr], origin: dict[str, str] | None) -> list[dict[str, Any]]:
    shape = ir.Shape([2, "n"], frozen=True)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
    last = ir.Node("", "Relu", [x], name="last")
    graph = ir.Graph([x], [], nodes=[last])
    net = Network.of(graph)
    made = [("a", ir.DataType.FLOAT, shape), ("a.1", ir.DataType.INT64, shape)]
    node = make.make_node(domain, "Op", (x, None, x), attributes, made, None, "a", origin)
    steps = [_shown(node)]
    net.order.put(node, last, node.inputs)
    other = make.make_node(domain, "Op", (node.outputs[0],), [], made[1:], 3, "b", None)
    net.order.put(other, last, other.inputs)
    steps += [
        _shown(node),
        _shown(other),
        {"list": [n.name for n in make.nodes_of(graph)], "back": len(graph)},
    ]
    walked = iter(graph)
    next(walked)
    lone: list[ir.Value] = []
    gone = remove_dead(net, [other], lone)
    # A walk goes on over what is taken out under it.
    steps += [{"gone": gone, "lone": [v.name for v in lone]}]
    steps += [_shown(node), _shown(other), {"rest": [n.name for n in walked], "back": len(graph)}]
    steps += [{"reversed": [n.name for n in reversed(graph)], "uses": next(u.idx for u in x.uses())}]
    graph.append(ir.Node("", "Neg", [x]))
    return [*steps, {"named": graph[-1].name, "out": graph[-1].outputs[0].name}]


@pytest.mark.parametrize("domain", ["", "ai.onnx", "com.microsoft"])
@pytest.mark.parametrize("attributes", [[], [ir.AttrInt64("axis", 1)]])
@pytest.mark.parametrize("origin", [None, {"source": "model.py:3"}])
def test_short_is_long(
    domain: str, attributes: list[ir.Attr], origin: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = _steps(domain, attributes, origin)
    monkeypatch.setattr(make, "SHORT", False)
    assert short == _steps(domain, attributes, origin)

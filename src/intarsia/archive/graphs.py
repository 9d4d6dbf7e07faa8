"""FX graphs as JSON: nodes with the names of their operators, attributes by reference.

`torch.export.save` is not used: its reader calls `pickle.loads` and `torch.load(weights_only=False)` on
members that a file may choose (torch 2.13, `pt2_archive/_package.py`). Names are looked up in `torch.ops`, so
a reader can see that a graph runs nothing else.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from intarsia.archive.operators import find_operator, name_of
from intarsia.archive.tensors import TensorTable
from intarsia.archive.values import Devices, Json, from_json, same_device, to_json
from intarsia.errors import ArchiveError
from intarsia.graph.source import module_path, source_line

# FX writes these into the source of a function, so that a name must be nothing but a name.
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PATH = re.compile(r"\w+(\.\w+)*", re.ASCII)
_LINE = re.compile(r"([\w.\-<> ]+):(\d+)", re.ASCII)

WriteModule = Callable[[nn.Module], Json]
ReadModule = Callable[[Json], nn.Module]


def graph_to_json(
    module: fx.GraphModule, tensors: TensorTable, write_module: WriteModule, *, values: bool = False
) -> Json:
    """A graph with what it refers to; `values` are dtypes and shapes, for engines that read the graph."""
    nodes, attributes = [], {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            path = str(node.target)
            held = attrgetter(path)(module)
            attributes[path] = (
                {"tensor": tensors.add(held, path)} if isinstance(held, torch.Tensor) else write_module(held)
            )
        nodes.append(_node_to_json(node, values))
    return {"nodes": nodes, "attributes": attributes}


def _node_to_json(node: fx.Node, values: bool) -> Json:
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        raise ArchiveError(f"a node of kind {node.op} ({node.name}) cannot be saved")
    written: dict[str, Json] = {"op": node.op, "name": node.name}
    if node.op == "call_function":
        written["target"] = name_of(node.target)
    elif node.op != "output":
        written["target"] = str(node.target)
    if node.args:
        written["args"] = [to_json(arg) for arg in node.args]
    if node.kwargs:
        written["kwargs"] = {name: to_json(arg) for name, arg in node.kwargs.items()}
    if path := module_path(node):
        written["module"] = path
    if line := source_line(node):
        written["line"] = line
    if values:
        written["value"] = _value_to_json(node.meta.get("val"))
    return written


def _value_to_json(value: Any) -> Json:
    """Dtype, shape, strides and device of a tensor whose sizes are fixed; None of anything else."""
    if isinstance(value, list | tuple):
        return [_value_to_json(item) for item in value]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return None
    parts = (value.dtype, list(value.shape), list(value.stride()), value.device)
    return {"tensor": [to_json(part) for part in parts]}


@dataclass(frozen=True, eq=False)
class ReadGraph:
    """A graph, and what it refers to."""

    graph: fx.Graph
    root: Mapping[str, Any]

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph as a module; made when it is asked for, since that takes as long as reading it."""
        return fx.GraphModule(dict(self.root), self.graph)


def graph_from_json(
    found: Json,
    tensors: Mapping[str, torch.Tensor],
    read_module: ReadModule,
    devices: Devices = same_device,
) -> ReadGraph:
    """The graph; operators are looked up by name."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for written in found["nodes"]:
        node = _node_from_json(graph, written, nodes, devices)
        if node.name != written["name"] or written["name"] in nodes:
            raise ArchiveError(f"the graph has a node of the name {written['name']!r}, which cannot be given")
        nodes[node.name] = node
    root: dict[str, Any] = {}
    for path, held in found["attributes"].items():
        if _PATH.fullmatch(path) is None:
            raise ArchiveError(f"the graph has an attribute {path!r}, which is not a name")
        root[path] = tensors[held["tensor"]] if "tensor" in held else read_module(held)
    missing = [n.target for n in graph.nodes if n.op == "get_attr" and n.target not in root]
    if missing:
        raise ArchiveError(f"the graph reads {missing[0]!r}, which is not there")
    return ReadGraph(graph, root)


def _node_from_json(graph: fx.Graph, found: Json, nodes: Mapping[str, fx.Node], devices: Devices) -> fx.Node:
    op, name, target = found["op"], found["name"], found.get("target", "output")
    args = tuple(from_json(arg, nodes, devices) for arg in found.get("args", []))
    kwargs = {key: from_json(arg, nodes, devices) for key, arg in found.get("kwargs", {}).items()}
    for given in (name, *kwargs, *([target] if op == "placeholder" else [])):
        if _NAME.fullmatch(given) is None or keyword.iskeyword(given):
            raise ArchiveError(f"the graph calls something {given!r}, which is not a name")
    if op == "call_function":
        target = find_operator(target)
    elif op == "get_attr":
        if _PATH.fullmatch(target) is None:
            raise ArchiveError(f"the graph reads an attribute {target!r}, which is not a name")
    elif op not in ("placeholder", "output"):
        raise ArchiveError(f"the graph has a node of the kind {op!r}")
    node = graph.create_node(op, target, args, kwargs, name)
    if path := found.get("module"):
        node.meta["nn_module_stack"] = {"": (str(path), "")}
    if line := _LINE.fullmatch(found.get("line", "")):
        node.stack_trace = f'File "{line[1]}", line {line[2]}'
    if found.get("value") is not None:
        node.meta["val"] = _value_from_json(found["value"], devices)
    return node


def _value_from_json(found: Json, devices: Devices) -> Any:
    # The one place of this package that makes tensors without memory; tests/archive/test_engines.py watches.
    from torch._subclasses.fake_tensor import FakeTensorMode

    if isinstance(found, list):
        return [_value_from_json(item, devices) for item in found]
    if found is None:
        return None
    dtype, shape, strides, device = (from_json(part, None, devices) for part in found["tensor"])
    with FakeTensorMode():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

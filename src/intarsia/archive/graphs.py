"""FX graphs as JSON: nodes with the names of their operators, and attributes by reference.

These are the graphs of a compiled module and of its pieces, and the captured one, which a refit needs.

`torch.export.save` is not used: its reader calls `pickle.loads` and `torch.load(weights_only=False)` on
members that a file may choose (torch 2.13, `pt2_archive/_package.py`). Operators are looked up in
`torch.ops`, so a graph can run nothing else.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from intarsia.archive.codec import Devices, Json, from_json, same_device, to_json
from intarsia.archive.tensors import TensorTable
from intarsia.errors import ArchiveError
from intarsia.graph.nodes import CONTROL_FLOW, SIZE_FUNCTIONS, module_path, source_line

# FX writes these into the source of a function, so they must be identifiers.
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PATH = re.compile(r"\w+(\.\w+)*", re.ASCII)
_LINE = re.compile(r"([\w.\-<> ]+):(\d+)", re.ASCII)
_TENSORS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_OVERLOAD = re.compile(r"(\w+)::(\w+)\.(\w+)", re.ASCII)
# These operators open, and may create, the file that an argument names.
_REFUSED = frozenset({"aten::from_file.default", "aten::from_file.out"})

_MATH = "floor ceil trunc sqrt log log2 exp sin cos tan asin acos atan sinh cosh tanh pow fabs"
_SYMBOLIC = """sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum _sym_sqrt _sym_log2 _sym_cos
 _sym_cosh _sym_sin _sym_sinh _sym_tan _sym_tanh _sym_asin _sym_acos _sym_atan"""
# Functions of sizes, which can only compute.
_FUNCTIONS: dict[str, Any] = {
    "operator.getitem": operator.getitem,
    **SIZE_FUNCTIONS,
    **{f"math.{name}": getattr(math, name) for name in _MATH.split()},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split() if hasattr(torch, name)},
}
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}

WriteModule = Callable[[nn.Module], Json]
ReadModule = Callable[[Json], nn.Module]


def graph_to_json(
    module: fx.GraphModule, tensors: TensorTable, write_module: WriteModule, *, values: bool = False
) -> Json:
    """A graph with its attributes; `values` adds dtypes and shapes, for engines that read graphs."""
    nodes, attributes = [], {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            path = str(node.target)
            value = attrgetter(path)(module)
            attributes[path] = (
                {"tensor": tensors.add(value, path)}
                if isinstance(value, torch.Tensor)
                else write_module(value)
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
    """Dtype, shape, strides and device of a tensor of fixed size; None for other values."""
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
    """A graph and its attributes."""

    graph: fx.Graph
    root: Mapping[str, Any]

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph as a module, built at the first access, which takes as long as reading it."""
        return fx.GraphModule(dict(self.root), self.graph)


def graph_from_json(
    entry: Json,
    tensors: Mapping[str, torch.Tensor],
    read_module: ReadModule,
    devices: Devices = same_device,
) -> ReadGraph:
    """The graph; operators are looked up by name."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for written in entry["nodes"]:
        node = _node_from_json(graph, written, nodes, devices)
        if node.name != written["name"] or written["name"] in nodes:
            raise ArchiveError(f"the graph has a node of the name {written['name']!r}, which cannot be given")
        nodes[node.name] = node
    root: dict[str, Any] = {}
    for path, attribute in entry["attributes"].items():
        if _PATH.fullmatch(path) is None:
            raise ArchiveError(f"the graph has an attribute {path!r}, which is not a name")
        root[path] = tensors[attribute["tensor"]] if "tensor" in attribute else read_module(attribute)
    missing = [n.target for n in graph.nodes if n.op == "get_attr" and n.target not in root]
    if missing:
        raise ArchiveError(f"the graph reads {missing[0]!r}, which does not exist")
    return ReadGraph(graph, root)


def _node_from_json(graph: fx.Graph, entry: Json, nodes: Mapping[str, fx.Node], devices: Devices) -> fx.Node:
    op, name, target = entry["op"], entry["name"], entry.get("target", "output")
    args = tuple(from_json(arg, nodes, devices) for arg in entry.get("args", []))
    kwargs = {key: from_json(arg, nodes, devices) for key, arg in entry.get("kwargs", {}).items()}
    for word in (name, *kwargs, *([target] if op == "placeholder" else [])):
        if _NAME.fullmatch(word) is None or keyword.iskeyword(word):
            raise ArchiveError(f"the graph calls something {word!r}, which is not a name")
    if op == "call_function":
        target = find_operator(target)
    elif op == "get_attr":
        if _PATH.fullmatch(target) is None:
            raise ArchiveError(f"the graph reads an attribute {target!r}, which is not a name")
    elif op not in ("placeholder", "output"):
        raise ArchiveError(f"the graph has a node of the kind {op!r}")
    node = graph.create_node(op, target, args, kwargs, name)
    if path := entry.get("module"):
        node.meta["nn_module_stack"] = {"": (str(path), "")}
    if line := _LINE.fullmatch(entry.get("line", "")):
        node.stack_trace = f'File "{line[1]}", line {line[2]}'
    if entry.get("value") is not None:
        node.meta["val"] = _value_from_json(entry["value"], devices)
    return node


def _value_from_json(entry: Json, devices: Devices) -> Any:
    # The only place of this package that creates fake tensors from a file (tests/archive/test_engines.py).
    from torch._subclasses.fake_tensor import FakeTensorMode

    if isinstance(entry, list):
        return [_value_from_json(item, devices) for item in entry]
    if entry is None:
        return None
    dtype, shape, strides, device = (from_json(part, None, devices) for part in entry["tensor"])
    with FakeTensorMode():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def captured_module(program: ExportedProgram) -> fx.GraphModule:
    """The captured graph, with parameters and buffers by the model's own names."""
    signature = program.graph_signature
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise ArchiveError("its captured graph returns more than the model's results")
    specs = {spec.arg.name: spec for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT}
    graph, root = fx.Graph(), dict[str, Any]()
    copied: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        spec = specs.get(node.name) if node.op == "placeholder" else None
        if spec is None:
            if node.op == "get_attr":
                root[str(node.target)] = getattr(program.graph_module, str(node.target))
            copied[node] = graph.node_copy(node, copied.__getitem__)
            continue
        name = str(spec.target)
        tensor = program.state_dict.get(name, program.constants.get(name))
        if spec.kind not in _TENSORS or not isinstance(tensor, torch.Tensor):
            raise ArchiveError(f"its captured graph takes {name}, a {spec.kind.name.lower()}")
        root[name] = tensor
        copied[node] = graph.create_node("get_attr", name, (), {}, name=node.name)
    return fx.GraphModule(root, graph)


def captured_to_json(module: fx.GraphModule, tensors: TensorTable, write_module: WriteModule) -> bytes:
    """The captured graph, and the names of its parameters."""
    written = {
        "graph": graph_to_json(module, tensors, write_module),
        "parameters": [name for name, _ in module.named_parameters(remove_duplicate=False)],
    }
    return json.dumps(written, allow_nan=False).encode()


def captured_from_json(
    data: memoryview, tensors: Mapping[str, torch.Tensor], read_module: ReadModule, devices: Devices
) -> fx.GraphModule:
    """The captured graph. Its operators are looked up by name, as in all graphs of an archive."""
    table = json.loads(bytes(data))
    read = graph_from_json(table["graph"], tensors, read_module, devices)
    root = dict(read.root)
    for name in table["parameters"]:
        root[name] = nn.Parameter(root[name], requires_grad=False)
    return fx.GraphModule(root, read.graph)


def name_of(target: Any) -> str:
    """The name of an operator; ArchiveError if it cannot be looked up by a name."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}::{target._opname}.{target._overloadname}"
        if name in _REFUSED:
            raise ArchiveError(f"{name} reads a file, which a loaded model may not do")
        return name
    if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in CONTROL_FLOW:
        return f"higher_order::{target.__name__}"
    if id(target) in _NAMES:
        return _NAMES[id(target)]
    raise ArchiveError(f"{target} is not an operator of torch's registry, so that it cannot be saved by name")


def find_operator(name: str) -> Any:
    """The operator of that name; ArchiveError if it is not allowed, or not registered in this process."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    space, _, rest = name.partition("::")
    if space == "higher_order" and rest in CONTROL_FLOW:
        return getattr(torch.ops.higher_order, rest)
    parts = _OVERLOAD.fullmatch(name)
    if parts is None or name in _REFUSED:
        raise ArchiveError(f"the archive names {name!r}, which is not an allowed operator")
    try:
        overload = getattr(getattr(getattr(torch.ops, parts[1]), parts[2]), parts[3])
    except (AttributeError, RuntimeError):
        overload = None
    if not isinstance(overload, torch._ops.OpOverload):
        raise ArchiveError(
            f"the archive uses the operator {name}, which is not registered in this process; import the"
            " package that defines it, then load"
        )
    return overload

"""The program a module was lowered from, as a flat graph: what a refit begins with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from intarsia.archive.graphs import ReadModule, WriteModule, graph_from_json, graph_to_json
from intarsia.archive.tensors import TensorTable
from intarsia.archive.values import Devices
from intarsia.errors import ArchiveError

CAPTURED = "captured.json"
_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def captured_module(program: ExportedProgram) -> fx.GraphModule:
    """The captured graph, with parameters and buffers under the model's own names for them."""
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
        held = program.state_dict.get(name, program.constants.get(name))
        if spec.kind not in _HELD or not isinstance(held, torch.Tensor):
            raise ArchiveError(f"its captured graph takes {name}, a {spec.kind.name.lower()}")
        root[name] = held
        copied[node] = graph.create_node("get_attr", name, (), {}, name=node.name)
    return fx.GraphModule(root, graph)


def captured_to_json(module: fx.GraphModule, tensors: TensorTable, write_module: WriteModule) -> bytes:
    """The graph, and which of what it holds are parameters."""
    written = {
        "graph": graph_to_json(module, tensors, write_module),
        "parameters": [name for name, _ in module.named_parameters(remove_duplicate=False)],
    }
    return json.dumps(written, allow_nan=False).encode()


def captured_from_json(
    data: memoryview, tensors: Mapping[str, torch.Tensor], read_module: ReadModule, devices: Devices
) -> fx.GraphModule:
    """The graph again; operators are looked up by name, as in all graphs of an archive."""
    table = json.loads(bytes(data))
    read = graph_from_json(table["graph"], tensors, read_module, devices)
    root = dict(read.root)
    for name in table["parameters"]:
        root[name] = nn.Parameter(root[name], requires_grad=False)
    return fx.GraphModule(root, read.graph)

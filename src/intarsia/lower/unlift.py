"""From a lifted export graph to a graph with weights as attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.immutable_collections import immutable_dict
from torch.utils import _pytree as pytree

from intarsia.capture.size_guards import guard_texts
from intarsia.errors import LoweringError
from intarsia.lower.lowered import GraphInput, GraphOutput, Lowered, Role


def unlift(program: ExportedProgram) -> Lowered:
    """The graph with parameters and constant buffers as attributes; buffers that change stay inputs."""
    signature = program.graph_signature
    changed = set(signature.buffers_to_mutate.values())
    root = torch.nn.Module()
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    inputs: list[GraphInput] = []
    buffers: dict[str, torch.Tensor] = {}
    attributes: dict[int, str] = {}
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    user = 0
    for node in program.graph.nodes:
        if node.op == "output":
            break
        if node.op != "placeholder":
            copied[node] = _copy(graph, node, copied, program.graph_module, root)
            continue
        spec = specs[node.name]
        if spec.kind == InputKind.USER_INPUT:
            is_constant = isinstance(spec.arg, ConstantArgument)
            constant = spec.arg.value if isinstance(spec.arg, ConstantArgument) else None
            inputs.append(GraphInput(node.name, index=user, constant=constant, is_constant=is_constant))
            copied[node] = graph.placeholder(node.name)
            user += 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            target = str(spec.target)
            tensor = _state(program, target)
            if target in changed:
                buffers[target] = tensor
                inputs.append(GraphInput(node.name, buffer=target))
                copied[node] = graph.placeholder(node.name)
            else:
                name = attributes.get(id(tensor)) or _attach(root, node.name, tensor)
                attributes[id(tensor)] = name
                copied[node] = graph.get_attr(name)
        else:
            raise LoweringError(
                f"the model takes {node.name}, a {spec.kind.name.lower()}, which is not handled"
            )
        copied[node].meta = dict(node.meta)
    outputs = _outputs(program, graph, copied)
    module = fx.GraphModule(root, graph)
    # A copy made before the model writes to an input or buffer must stay a copy.
    module.meta["writes"] = any(output.role is not Role.USER for output in outputs)
    names = _input_names(program)
    guards, notes = guard_texts(program)
    return Lowered(
        module=module,
        inputs=tuple(inputs),
        outputs=outputs,
        in_spec=program.call_spec.in_spec,
        out_spec=_plain(program.call_spec.out_spec),
        buffers=buffers,
        input_names=names,
        range_constraints=dict(program.range_constraints),
        guards=guards,
        notes=notes,
    )


def _copy(
    graph: fx.Graph,
    node: fx.Node,
    copied: dict[fx.Node, fx.Node],
    source: fx.GraphModule,
    root: torch.nn.Module,
) -> fx.Node:
    if node.op == "get_attr" and not hasattr(root, str(node.target)):
        setattr(root, str(node.target), getattr(source, str(node.target)))
    return graph.node_copy(node, copied.__getitem__)


def _state(program: ExportedProgram, target: str) -> torch.Tensor:
    value = program.state_dict.get(target)
    if value is None:
        value = program.constants.get(target)
    if not isinstance(value, torch.Tensor):
        raise LoweringError(f"{target} is a {type(value).__name__}, which is not handled")
    return value.detach()


def _attach(root: torch.nn.Module, name: str, tensor: torch.Tensor) -> str:
    # A plain attribute: the tensor is the model's own, not a parameter of the graph.
    object.__setattr__(root, name, tensor)
    root.__dict__[name] = tensor
    return name


def _outputs(
    program: ExportedProgram, graph: fx.Graph, copied: dict[fx.Node, fx.Node]
) -> tuple[GraphOutput, ...]:
    output = program.graph.output_node()
    outputs: list[GraphOutput] = []
    returned: list[Any] = []
    user_inputs = set(_input_names(program))
    first_place: dict[fx.Node, int] = {}
    for spec, item in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        is_node = isinstance(item, fx.Node)
        returned.append(copied[item] if is_node else item)
        if spec.kind == OutputKind.USER_OUTPUT:
            first = first_place.setdefault(item, len(outputs)) if is_node else len(outputs)
            outputs.append(
                GraphOutput(
                    Role.USER,
                    constant=None if is_node else item,
                    is_constant=not is_node,
                    is_input=is_node and item.op == "placeholder" and item.name in user_inputs,
                    twin=first if first != len(outputs) else None,
                )
            )
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            outputs.append(GraphOutput(Role.BUFFER, target=spec.target))
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            outputs.append(GraphOutput(Role.INPUT, target=spec.target))
        else:
            raise LoweringError(f"the model makes a {spec.kind.name.lower()}, which is not handled")
    graph.output(tuple(returned))
    return tuple(outputs)


def _plain(spec: Any) -> Any:
    """The structure of results with plain lists and dictionaries instead of those of `fx.symbolic_trace`."""
    if "immutable_" not in repr(spec):
        return spec

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            items = {key: plain(item) for key, item in value.items()}
            return items if isinstance(value, immutable_dict) else type(value)(items)
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, tuple):
            parts = [plain(item) for item in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    return pytree.tree_structure(plain(pytree.tree_unflatten([0] * spec.num_leaves, spec)))


def _input_names(program: ExportedProgram) -> tuple[str, ...]:
    kinds = (InputKind.USER_INPUT,)
    return tuple(spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in kinds)

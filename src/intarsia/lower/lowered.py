"""The lowered graph: functional ATen, weights as attributes, a flat list of inputs and of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.immutable_collections import immutable_dict
from torch.utils import _pytree as pytree

from intarsia.capture.size_guards import guard_texts
from intarsia.errors import LoweringError, some_of
from intarsia.lower.result_memory import IN_ROWS, Layouts, OutputView


class Role(Enum):
    """What happens to an output of the graph."""

    USER = "returned to the caller"
    BUFFER = "written back to a buffer"
    INPUT = "written back to an input"


@dataclass(frozen=True)
class GraphInput:
    """One flat input: an argument (`index` in the flattened call) or a buffer that the model changes."""

    name: str
    index: int | None = None
    buffer: str | None = None
    constant: Any = None
    is_constant: bool = False


@dataclass(frozen=True)
class GraphOutput:
    """One flat output; `target` names the buffer or input that it is written to.

    `is_input`: the output is an input itself. `twin`: the output is the same tensor as the one at this place.
    """

    role: Role
    target: str | None = None
    constant: Any = None
    is_constant: bool = False
    is_input: bool = False
    twin: int | None = None


@dataclass(frozen=True)
class Lowered:
    """A functional graph, and how a call of the model maps to it."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    buffers: dict[str, torch.Tensor]
    input_names: tuple[str, ...]
    range_constraints: dict[Any, Any]
    guards: tuple[str, ...] = ()  # conditions on sizes that the graph assumes, as export writes them
    notes: tuple[str, ...] = ()  # for the user, on how the model was captured
    program: ExportedProgram | None = None  # the captured program, for a refit
    views: tuple[OutputView | None, ...] = ()  # for each of the user's results, how it shares memory
    layouts: Layouts = IN_ROWS  # the memory layouts of the user's results


def example_inputs(lowered: Lowered, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs of the graph for a call, in the order of its placeholders."""
    flat, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return [lowered.buffers[i.buffer] if i.buffer else flat[i.index or 0] for i in lowered.inputs]


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


# Operators that lowering replaced. Their names are kept at the nodes that replace them, for the user's
# options.

_KEY = "intarsia.replaces"


def note_replaced(node: fx.Node, targets: list[Any]) -> None:
    """Record the names of operators that a node replaces."""
    node.meta[_KEY] = tuple(dict.fromkeys([*node.meta.get(_KEY, ()), *map(str, targets)]))


def replaced_by(node: fx.Node) -> tuple[str, ...]:
    """The full names of the operators that a node replaces."""
    names: tuple[str, ...] = node.meta.get(_KEY, ())
    return names


def note_left(module: fx.GraphModule, what: str, left: Mapping[str, Sequence[str]]) -> None:
    """Add a note for the user for each reason why nodes of these names are not changed."""
    for reason, names in left.items():
        module.meta.setdefault("left", []).append(f"{what}: {some_of(names)}: {reason}")

"""The kinds of nodes in a lowered graph (compute, free, view, control flow), their origins and memory."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from intarsia.lower.purity import (
    is_pure,
    is_pure_operator,
    is_view_op,
    updates_statistics,
    written_arguments,
)

_OPERATORS = """add sub mul truediv floordiv mod pow neg pos abs lt le eq ne ge gt and_ or_ xor not_ invert
 lshift rshift"""
# Arithmetic on sizes, by the names that files have for it; all of these can only compute.
SIZE_FUNCTIONS: dict[str, Any] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"builtins.{kind.__name__}": kind for kind in (min, max, abs, int, float, bool, round)},
}
_SYM_OPERATORS: frozenset[Any] = frozenset(SIZE_FUNCTIONS.values())
_SIZE_PACKETS = frozenset(
    {
        torch.ops.aten.sym_size,
        torch.ops.aten.sym_numel,
        torch.ops.aten.sym_stride,
        torch.ops.aten.sym_storage_offset,
    }
)
CONTROL_FLOW = frozenset({"cond", "while_loop", "scan", "map_impl", "associative_scan"})


def is_free(node: fx.Node) -> bool:
    """Whether a node makes no layer: constants, `getitem`, sizes, and arithmetic on sizes."""
    if node.op != "call_function":
        return node.op == "get_attr"
    kind = _kind(node.target)
    return kind is not _Kind.COMPUTE and (kind is not _Kind.ARITHMETIC or _on_scalars(node))


def is_compute(node: fx.Node) -> bool:
    """Whether a node computes something, so that it belongs to a segment."""
    return node.op in ("call_function", "call_method", "call_module") and not is_free(node)


def is_getitem(node: fx.Node) -> bool:
    """True for `operator.getitem`, which picks one result of a node with several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_size(node: fx.Node) -> bool:
    """True for nodes that read a size, stride or element count off a tensor."""
    return node.op == "call_function" and _kind(node.target) is _Kind.SIZE


def is_control_flow(node: fx.Node) -> bool:
    """Whether a node is `torch.cond`, `while_loop`, `scan` or similar, which have a segment of their own."""
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in CONTROL_FLOW


def is_view(node: fx.Node) -> bool:
    """True when the node returns one tensor that shares its first argument's memory."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and is_view_op(target)


def is_creation(node: fx.Node) -> bool:
    """True when the node makes a tensor out of numbers alone, such as `full` or `arange`."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and _is_creation_op(target)


def has_no_effect(node: fx.Node) -> bool:
    """Whether a node, and the bodies it has, draws no random numbers and changes nothing in place."""
    if is_free(node) or node.op == "placeholder":
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return all(has_no_effect(inner) for body in bodies_of(node) for inner in body.graph.nodes)
    if isinstance(node.target, torch._ops.OpOverload):
        return is_pure(node)
    return node.op == "output" or not node.is_impure()


def is_ordered(node: fx.Node) -> bool:
    """Whether the order of a node relative to others matters: it draws random numbers or has side effects."""
    return is_compute(node) and not has_no_effect(node)


def bodies_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs among the arguments of a higher-order operator, such as the branches of `cond`."""
    owner = node.graph.owning_module
    sources = [value for value in node.all_input_nodes if value.op == "get_attr"]
    if owner is None:
        return []
    bodies = [operator.attrgetter(str(value.target))(owner) for value in sources]
    return [body for body in bodies if isinstance(body, fx.GraphModule)]


def producer(node: fx.Node) -> fx.Node:
    """The node that computes the value of `node`: itself, or the one whose result it is an item of."""
    while is_getitem(node):
        node = node.all_input_nodes[0]
    return node


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The graph's compute nodes, in graph order."""
    return [node for node in graph.nodes if is_compute(node)]


def op_name(node: fx.Node) -> str:
    """The name of a node's operator, such as `aten.add.Tensor`."""
    target = node.target
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    module = getattr(target, "__module__", "")
    name = getattr(target, "__name__", str(target))
    return f"operator.{name}" if module == "_operator" else name


def whereabouts(node: fx.Node) -> str:
    """The name, module path and source line of a node as text."""
    parts = [node.name]
    if path := module_path(node):
        parts.append(f"in {path}")
    if line := source_line(node):
        parts.append(f"at {line}")
    return " ".join(parts)


class _Kind(Enum):
    GETITEM = "getitem"
    SIZE = "size"
    ARITHMETIC = "arithmetic"  # free on sizes, work on tensors
    COMPUTE = "compute"


@cache
def _kind(target: Any) -> _Kind:
    if target is operator.getitem:
        return _Kind.GETITEM
    if getattr(target, "overloadpacket", target) in _SIZE_PACKETS:
        return _Kind.SIZE
    name = getattr(target, "__name__", "")
    symbolic = getattr(target, "__module__", None) == "torch" and name.startswith("sym_")
    if target in _SYM_OPERATORS or symbolic or getattr(math, name, None) is target:
        return _Kind.ARITHMETIC
    return _Kind.COMPUTE


def _on_scalars(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if value is not None:
        return not isinstance(value, torch.Tensor)
    return not any(isinstance(arg.meta.get("val"), torch.Tensor) for arg in node.all_input_nodes)


@cache
def _is_creation_op(target: torch._ops.OpOverload) -> bool:
    schema = target._schema
    if not is_pure_operator(target) or len(schema.returns) != 1:
        return False
    if str(schema.returns[0].type) != "Tensor" or "empty" in target.__name__:
        return False
    return not any("Tensor" in str(argument.type) for argument in schema.arguments)


def values_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that are results of a node."""
    result = node.meta.get("val")
    for value in result if isinstance(result, list | tuple) else [result]:
        if isinstance(value, torch.Tensor):
            yield value


def uses_gpu(graph: fx.Graph) -> bool:
    """Whether any value of a graph is on an NVIDIA GPU."""
    return any(value.is_cuda for node in graph.nodes for value in values_of(node))


# The origin of a node in the user's model: module path and source line.

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def modules(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The modules the node was traced in, outermost first, as (qualified path, class or its name)."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, kind in stack.values():
        yield _clean_path(path), kind


def module_path(node: fx.Node) -> str:
    """The qualified path of the innermost module the node was traced in; empty for the root."""
    stack = node.meta.get("nn_module_stack")
    return _clean_path(list(stack.values())[-1][0]) if stack else ""


def source_line(node: fx.Node, *, full: bool = False) -> str:
    """The line of the user's code that a node comes from, as `file.py:12`; empty if it is unknown."""
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{path if full else PurePath(path).name}:{line}"


def made_from(node: fx.Node) -> Iterator[Any]:
    """The nodes that export and decomposition made a node from, as torch records them (`NodeSource`)."""
    sources = [*node.meta.get("from_node", ())]
    while sources:
        source = sources.pop()
        yield source
        sources += source.from_node


def origin_of(node: fx.Node) -> dict[str, str]:
    """The name, module and source line of a node, as metadata of layers."""
    origin = node.meta.get("intarsia.origin")
    if origin is None:
        origin = {"fx": node.name}
        if path := module_path(node):
            origin["module"] = path
        if line := source_line(node, full=True):
            origin["source"] = line
        node.meta["intarsia.origin"] = origin
    return dict(origin)


def _clean_path(path: str) -> str:
    # torch.export writes "L['self'].layers.0" or "layers.0", by version and by mode; torch.compile writes
    # "L['self']._modules['layers']._modules['0']" or "L['self'].layers[0]".
    path = re.sub(r"^[LG]\['[^']+'\]\.?", "", path)
    path = re.sub(r"\.?_modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return path.lstrip(".")


# Aliasing and mutation: which values share memory, and which values a node changes in place.


_MAY_ALIAS = torch.Tag.maybe_aliasing_or_mutating


def changed_values(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node changes in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return [] if node.op != "call_function" or has_no_effect(node) else node.all_input_nodes
    roots = written_arguments(node)
    if _MAY_ALIAS in target.tags and updates_statistics(node) is not False:
        # In training, batch_norm updates the running statistics, which its schema does not say.
        roots += [v for v in node.all_input_nodes if _is_buffer(v)]
    return roots


def memory_of(node: fx.Node) -> frozenset[fx.Node]:
    """The nodes whose memory the value of `node` may use: itself, or what it is a view or alias of."""
    members: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        value = waiting.pop()
        base = _base(value)
        if base is None:
            members.add(value)
        else:
            waiting.append(base)
    return frozenset(members)


def written_values(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Those of `nodes` whose memory one of them changes."""
    nodes = list(nodes)
    written = {root for node in nodes for value in changed_values(node) for root in memory_of(value)}
    return frozenset(node for node in nodes if memory_of(node) & written)


def _base(node: fx.Node) -> fx.Node | None:
    target = node.target
    if is_getitem(node):
        first = node.args[0]
    elif isinstance(target, torch._ops.OpOverload) and (
        _MAY_ALIAS in target.tags or any(r.alias_info is not None for r in target._schema.returns)
    ):
        first = node.args[0] if node.args else None
    else:
        return None
    return first if isinstance(first, fx.Node) else None


def _is_buffer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, torch.Tensor) and not value.requires_grad

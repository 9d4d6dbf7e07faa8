"""Names of operators and modules as users write them, and the nodes they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from intarsia.errors import PartitionError, UnknownNameError, near_names
from intarsia.graph.nodes import compute_nodes, made_from, modules, op_name
from intarsia.graph.sizes import size_hint
from intarsia.lower.lowered import replaced_by
from intarsia.lower.purity import is_view_op
from intarsia.partition.options import ModuleName, PartitionOptions

_EXAMPLE = "write e.g. 'relu', 'aten::add', 'aten::add.Tensor' or torch.ops.aten.add"
# The name an operator lowers to, by its target and the kinds of its arguments.
_lowered: dict[tuple[Any, ...], str | None] = {}


def op_matcher(name: object) -> Callable[[fx.Node], bool]:
    """A test for the nodes that `name` means; see `partition.options.OpName` for what a name may be.

    A packet, or a string without an overload, means all overloads. A node also has the name of the operator
    it was decomposed from, and of the operator it lowers to if there is only one (`conv2d`: `convolution`).
    """
    if isinstance(name, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _string_matcher(str(name))
    if isinstance(name, str):
        return _string_matcher(name)
    if callable(name) and str(getattr(name, "__module__", "")).startswith("torch"):
        plain = _string_matcher(str(getattr(name, "__name__", name)))
        return lambda node: node.target is name or plain(node)
    if callable(name):
        return lambda node: node.target is name
    raise PartitionError(f"{name!r} is not the name of an operator; {_EXAMPLE}")


@cache
def _string_matcher(name: str) -> Callable[[fx.Node], bool]:
    means = name_matcher(name)
    return lambda node: any(map(means, op_names(node)))


def name_matcher(name: str) -> Callable[[str], bool]:
    """A test for the full names of operators that `name` means."""
    plain = name.removeprefix("torch.ops.").replace("::", ".")
    if any(sign in plain for sign in "*?["):
        return lambda full: fnmatchcase(full, plain) or fnmatchcase(".".join(full.split(".")[:2]), plain)
    parts = plain.split(".")
    if not all(parts) or len(parts) > 3:
        raise PartitionError(f"{name!r} is not the name of an operator; {_EXAMPLE}")
    return lambda full: _means(plain, parts, full)


def _means(plain: str, parts: list[str], full: str) -> bool:
    if len(parts) == 1:
        return plain in (full, *full.split(".")[1:2])
    # "aten.add" means every overload; "operator.mul" and "higher_order.cond" are whole names.
    return full == plain or (len(parts) == 2 and full.startswith(plain + "."))


def op_names(node: fx.Node) -> list[str]:
    """The full names of a node: its own, those of the operators it came from, and of the one it lowers to."""
    lowered = _lowered_name(node)
    return [op_name(node), *_origins(node), *([] if lowered is None else [lowered])]


def _origins(node: fx.Node) -> list[str]:
    """The operators that a node was decomposed or exported from."""
    names = {source.target: None for source in made_from(node) if source.target.count(".") == 2}
    if node.meta.get("original_aten") is not None:
        names[str(node.meta["original_aten"])] = None
    return list(dict.fromkeys([*names, *replaced_by(node)]))


def _lowered_name(node: fx.Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    values = [value.meta.get("val") for value in node.all_input_nodes]
    forms = [(v.dtype, v.ndim) if isinstance(v, torch.Tensor) else type(v) for v in values]
    key = (node.target, len(node.args), tuple(node.kwargs), *forms)
    if key not in _lowered:
        ops = [op for op in _dispatched(node) if not is_view_op(op)]
        _lowered[key] = str(ops[0]) if len(ops) == 1 and ops[0] is not node.target else None
    return _lowered[key]


class DispatchedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that are dispatched while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def _dispatched(node: fx.Node) -> list[torch._ops.OpOverload]:
    """The operators that PyTorch runs for a node, recorded on meta tensors."""

    def stand_in(value: fx.Node) -> Any:
        meta = value.meta.get("val")
        if isinstance(meta, torch.Tensor):
            return torch.empty([size_hint(n) for n in meta.shape], dtype=meta.dtype, device="meta")
        return size_hint(meta) if isinstance(meta, torch.SymInt) else meta

    record = DispatchedOps()
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), stand_in)
        with record, torch.no_grad():
            node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an operator without a meta kernel has no name but its own
        return []
    return record.ops


def module_test(name: ModuleName) -> Callable[[str, Any], bool]:
    """A test for the path and the class (or the full name of the class) of a module that `name` means."""
    if isinstance(name, str):
        return lambda path, _: path == name or fnmatchcase(path, name)
    if isinstance(name, type):
        return lambda _, kind: kind is name or kind == f"{name.__module__}.{name.__qualname__}"
    raise PartitionError(f"torch_executed_modules holds {name!r}; name a class, a path or a glob")


def module_matcher(name: ModuleName) -> Callable[[fx.Node], str | None]:
    """A function that returns the path of the module by which `name` means a node, or None."""
    means = module_test(name)

    def find(node: fx.Node) -> str | None:
        return next((path or "the whole model" for path, kind in modules(node) if means(path, kind)), None)

    return find


def unknown_module(name: ModuleName, paths: Iterable[str], kinds: Iterable[str], why: str) -> str:
    """The message for a name that means no module, with near names."""
    plain, known = (name, paths) if isinstance(name, str) else (name.__name__, kinds)
    return f"torch_executed_modules names {plain!r}, {why}{near_names(plain, known)}"


def check_names(gm: fx.GraphModule, options: PartitionOptions, engines: Iterable[str]) -> None:
    """Raise `PartitionError` for a name in `options` that matches nothing in the graph or its bodies."""
    nodes = _nodes_of([gm])
    check_engine_names(options, engines)
    check_op_names([gm], options)
    for module in options.torch_executed_modules:
        find = module_matcher(module)
        if not any(map(find, nodes)):
            known = {path for node in nodes for path, _ in modules(node)}
            kinds = {str(getattr(kind, "__name__", kind)) for node in nodes for _, kind in modules(node)}
            message = unknown_module(module, known, kinds, "in which no node was traced")
            raise UnknownNameError(message, "torch_executed_modules", module)


def check_engine_names(options: PartitionOptions, engines: Iterable[str]) -> None:
    """Raise `PartitionError` for an engine in `options` that is not in use."""
    known = list(engines)
    for option in ("backend_priority", "backend_support_map", "memory_budget"):
        for engine in getattr(options, option) or ():
            if engine not in known:
                raise PartitionError(f"{option} names {engine!r}, but the engines are {known}")


def check_op_names(
    graphs: Iterable[fx.GraphModule],
    options: PartitionOptions,
    others: Callable[[], Iterable[str]] = lambda: (),
) -> None:
    """Raise `PartitionError` for an operator in `options` that is neither in the graphs nor in `others`."""
    nodes = _nodes_of(graphs)
    missing = [
        (option, name) for option, name in _ops_named(options) if not any(map(op_matcher(name), nodes))
    ]
    other_names = set(others()) if missing else set()
    for option, name in missing:
        if option == "backend_support_map" and is_operator(name):
            continue  # the map says what an engine may take of any model
        plain = name if isinstance(name, str) else str(getattr(name, "__name__", name))
        if isinstance(name, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            plain = str(name)
        if not any(map(name_matcher(plain), other_names)):
            full_names = [*other_names, *(full for node in nodes for full in op_names(node))]
            known = {part for full in full_names for part in _shorter(full)}
            hint = near_names(str(name).removeprefix("torch.ops."), known)
            message = f"{option} names {name!r}, which no node is{hint}"
            raise UnknownNameError(message, option, name)


def is_operator(name: Any) -> bool:
    """Whether torch, or an imported package that extends it, has an operator of this name.

    >>> is_operator("aten::conv2d"), is_operator("relu"), is_operator("aten::conv2"), is_operator("*")
    (True, True, False, True)
    """
    if isinstance(name, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    if not isinstance(name, str):
        return callable(name)
    if any(sign in name for sign in "*?["):
        return True
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    namespace, operator, *overload = ["aten", *parts] if len(parts) == 1 else parts
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return packet is not None and (not overload or overload[0] in packet.overloads())


def _nodes_of(graphs: Iterable[fx.GraphModule]) -> list[fx.Node]:
    """The nodes of graphs and of the bodies in them."""
    bodies = [body for gm in graphs for body in gm.modules() if isinstance(body, fx.GraphModule)]
    return [node for body in bodies for node in compute_nodes(body.graph)]


def _ops_named(options: PartitionOptions) -> Iterator[tuple[str, Any]]:
    for name in options.torch_executed_ops:
        yield "torch_executed_ops", name
    for names in (options.backend_support_map or {}).values():
        for name in names:
            yield "backend_support_map", name
    for pattern in options.atomic:
        for name in () if callable(pattern) else pattern:
            yield "atomic", name


def _shorter(full: str) -> tuple[str, ...]:
    packet = ".".join(full.split(".")[:2])
    return (packet.replace(".", "::", 1), full.split(".")[1] if "." in full else full)

"""What operators do besides computing: draw random numbers, write to arguments, return views of them.

torch has no tag for operators that read no clock and draw nothing, and merging two random draws gives a wrong
answer. So torch's own operators are known, and others count as pure only if their author says so.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from intarsia.lower.decompositions import OperatorSet

pure_operators: OperatorSet = OperatorSet("pure_operators")
pure_operators.__doc__ = """Operators outside torch that give the same answer for the same arguments.

Nothing in torch says of a custom operator whether it draws random numbers or reads a clock, so those not in
this set are never computed while compiling, shared between equal calls, or dropped where nobody reads them.

>>> from intarsia.lower.purity import pure_operators
>>> pure_operators.add(torch.ops.mylib.scale)  # doctest: +SKIP
"""
# Arguments that switch drawing off, with the value that does so.
_OFF = {"dropout_p": 0, "dropout": 0, "train": False, "training": False}
_PURE = frozenset({"aten", "prims", "quantized_decomposed", "intarsia"})  # namespaces: torch's and ours


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of an operator by its name in the schema, with defaults."""
    return bound_arguments(node.target, node.args, node.kwargs)


def bound_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a call that is no node."""
    declared = op._schema.arguments
    bound = {a.name: a.default_value if a.has_default_value() else None for a in declared}
    return bound | dict(zip(bound, args, strict=False)) | dict(kwargs)


def is_pure_operator(target: torch._ops.OpOverload) -> bool:
    """Whether an operator computes from its arguments alone and changes nothing, for all arguments."""
    return _is_declared(target) and torch.Tag.nondeterministic_seeded not in target.tags


def is_pure(node: fx.Node) -> bool:
    """Whether a node gives the same result each time and changes nothing."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(target, torch._ops.OpOverload) or is_pure_operator(target):
        return True
    return _is_declared(target) and not draws(node)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention without dropout does not.

    >>> graph = fx.Graph()
    >>> q = graph.placeholder("q")
    >>> draws(graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, (q, q, q)))
    False
    >>> draws(graph.call_function(torch.ops.aten.rand_like.default, (q,)))
    True
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    off = _OFF | ({"p": 0} if target is torch.ops.aten.dropout.default else {})
    switches = {name: value for name, value in arguments(node).items() if name in off}
    return not any(isinstance(v, bool | int | float) and v == off[name] for name, v in switches.items())


def _is_declared(target: torch._ops.OpOverload) -> bool:
    """Whether an operator changes nothing, and is torch's or declared as pure."""
    if target._schema.is_mutable:
        return False
    return target.namespace in _PURE or target in pure_operators


def dequantizes(target: object) -> bool:
    """Whether an operator dequantizes. Its result is not folded, since engines may use the integers."""
    return isinstance(target, torch._ops.OpOverload) and str(target).startswith(
        "quantized_decomposed.dequantize"
    )


# The memory that nodes share and change, by the declarations of operators.

# These return a view or a copy; a copy does not change with its base.
_MAY_COPY = ("reshape", "flatten", "contiguous", "to", "unflatten")


# Declared as views, but they may copy or convert, or depend on strides: not free to recompute.
_NOT_VIEWS = frozenset(
    {torch.ops.aten.as_strided, torch.ops.aten.contiguous, torch.ops.aten.to, torch.ops.aten.type_as}
)


@cache
def is_view_op(target: torch._ops.OpOverload) -> bool:
    """True for operators whose one result shares the first argument's memory."""
    schema = target._schema
    if target.overloadpacket in _NOT_VIEWS or not is_pure_operator(target) or len(schema.returns) != 1:
        return False
    result = schema.returns[0]
    first = schema.arguments[0] if schema.arguments else None
    if result.alias_info is None or first is None or first.alias_info is None:
        return False
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    return str(result.type) == "Tensor" and tensors == 1


def alias_of(node: fx.Node) -> fx.Node | None:
    """The tensor whose memory a node's result uses, by the operator's schema."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        many = node.args[0]
        return many if isinstance(many, fx.Node) and alias_of(many) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    shared = schema.returns[0].alias_info.before_set or {"*"}  # the schema of a list has no sets
    values = arguments(node)
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is not None and (alias.before_set | alias.after_set) & shared:
            value = values[argument.name]
            return value if isinstance(value, fx.Node) else None
    return None


def may_copy(node: fx.Node) -> bool:
    """Whether an operator that is declared as a view may return a copy."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.name.split("::")[-1] in _MAY_COPY


def changes(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# Composite operators that write to running statistics in training, which their schema does not say, and the
# place of the flag.
_TRAINING: dict[Any, int] = {
    torch.ops.aten.batch_norm.default: 5,
    torch.ops.aten.instance_norm.default: 5,
}


def updates_statistics(node: fx.Node) -> bool | None:
    """Whether a normalization writes to its running statistics; None for other operators."""
    flag = _TRAINING.get(node.target)
    return None if flag is None else node.args[flag] is True


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes to."""
    if node.op != "call_function" or not changes(node):
        return []
    values = arguments(node)
    infos = [(values[a.name], a.alias_info) for a in node.target._schema.arguments]  # type: ignore[union-attr]
    written = [value for value, info in infos if info is not None and info.is_write]
    tensors = [x for value in written for x in (value if isinstance(value, list | tuple) else [value])]
    return [x for x in tensors if isinstance(x, fx.Node)]

"""Guards: what the exported graph takes for granted about sizes beyond their ranges.

A model that asks `if x.shape[0] == 1` was traced along one branch; the graph holds only where the answer is
the same. Export writes such conditions down as text. They are read here, never executed as code.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from intarsia.errors import InputError

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {"max": max, "min": min, "Max": max, "Min": min}
Reading = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, eq=False)
class Guard:
    """One condition on the flat inputs of a call."""

    text: str
    holds: Reading


def read_guards(texts: Sequence[str], places: Mapping[str, int]) -> tuple[Guard, ...]:
    """The conditions as functions of a call's flat inputs; `places` says where each named input is.

    A condition of a form not known here is left out with a warning.

    Example:
        >>> (guard,) = read_guards(["L['x'].size()[0] != 1"], {"x": 0})
        >>> guard.holds([torch.ones(1, 3)])
        False
    """
    guards = []
    for text in texts:
        try:
            guards.append(Guard(_readable(text), _reading(ast.parse(text, mode="eval").body, places)))
        except (SyntaxError, _Unknown) as error:
            warnings.warn(
                f"the condition {text} of the exported model is not checked ({error})", stacklevel=2
            )
    return tuple(guards)


def check_guards(guards: Sequence[Guard], flat: Sequence[Any]) -> None:
    """Raise InputError where a call does not meet a condition the graph was made under."""
    for guard in guards:
        if not guard.holds(flat):
            raise InputError(
                f"the call does not meet {guard.text}: for these sizes the model takes another path than the "
                "one compiled; compile it again with an example of these sizes"
            )


class _Unknown(Exception):
    pass


def _reading(node: ast.expr, places: Mapping[str, int]) -> Reading:
    def read(inner: ast.expr) -> Reading:
        return _reading(inner, places)

    match node:
        case ast.Constant(value=int() | float() as value):
            return lambda flat: value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b, apply = read(left), read(right), _BINARY[type(op)]
            return lambda flat: apply(a(flat), b(flat))
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _COMPARE for op in ops):
            terms = [read(left), *map(read, rest)]
            tests = [_COMPARE[type(op)] for op in ops]
            return lambda flat: all(
                test(a(flat), b(flat)) for test, a, b in zip(tests, terms[:-1], terms[1:], strict=True)
            )
        case ast.BoolOp(op=op, values=values):
            parts, join = [read(value) for value in values], all if isinstance(op, ast.And) else any
            return lambda flat: join(part(flat) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = read(operand)
            return lambda flat: not inner(flat)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = read(operand)
            return lambda flat: -inner(flat)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            parts, call = [read(arg) for arg in args], _CALLS[name]
            return lambda flat: call(*(part(flat) for part in parts))
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=tensor, attr="size" | "stride" as what), args=[]),
            slice=ast.Constant(value=int() as axis),
        ):
            place = _place(tensor, places)
            return lambda flat: _ask(flat[place], what)[axis]
        case ast.Subscript() if input_path(node) is not None:
            place = _place(node, places)  # an integer input
            return lambda flat: flat[place]
    raise _Unknown(f"{ast.unparse(node)} is not understood")


def _ask(tensor: torch.Tensor, what: str) -> Sequence[int]:
    return tensor.shape if what == "size" else tensor.stride()


def _place(node: ast.expr, places: Mapping[str, int]) -> int:
    path = input_path(node)
    if path is None or path not in places:
        raise _Unknown(f"{ast.unparse(node)} is not an input")
    return places[path]


def input_path(node: ast.expr) -> str | None:
    """`L['d']['k'][0]` as the name export gives that input: `d_k_0`."""
    keys: list[str] = []
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        keys.append(str(node.slice.value))
        node = node.value
    return "_".join(reversed(keys)) if isinstance(node, ast.Name) and node.id == "L" and keys else None


def _readable(text: str) -> str:
    """`L['x'].size()[0] != 1` as people write it: `x.shape[0] != 1`."""
    tree = ast.parse(text, mode="eval")

    class Plain(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            path = input_path(node)
            return ast.Name(path) if path else self.generic_visit(node)

    return ast.unparse(Plain().visit(tree)).replace(".size()", ".shape")

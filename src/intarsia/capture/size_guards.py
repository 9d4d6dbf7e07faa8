"""Guards: the assumptions of the exported graph about sizes, beyond their ranges.

A model that asks `if x.shape[0] == 1` was traced along one branch; the graph holds only where the answer is
the same. Export writes such conditions down as text. They are read here, never executed as code. What a text
of another form asks cannot be known, so the sizes it asks about are fixed.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from intarsia.errors import CaptureError, InputError

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# Functions by the names torch writes them with; none of them can do anything but compute a number.
_CALLS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (max, min, abs, round, int, float, bool)},
    **{name.capitalize(): function for name, function in (("max", max), ("min", min), ("abs", abs))},
    **{f"torch.sym_{kind.__name__}": kind for kind in (int, float)},
    **{f"torch.sym_{function.__name__}": function for function in (max, min)},
    "torch.sym_not": operator.not_,
}
_MATH = ("floor", "ceil", "trunc", "sqrt", "log", "log2", "exp", "sin", "cos", "tan", "asin", "acos", "atan")
_HYPERBOLIC = ("sinh", "cosh", "tanh")
_CALLS |= {f"math.{name}": getattr(math, name) for name in (*_MATH, *_HYPERBOLIC)}
_CALLS |= {f"torch._sym_{name}": getattr(math, name) for name in (*_MATH, *_HYPERBOLIC)}
_CONSTANTS = {"math.inf": math.inf, "math.pi": math.pi, "inf": math.inf}
Reading = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, eq=False)
class SizeGuard:
    """One condition on the flat inputs of a call."""

    text: str
    holds: Reading


def read_guards(texts: Sequence[str], places: Mapping[str, int]) -> tuple[SizeGuard, ...]:
    """The conditions as functions of a call's flat inputs; `places` says where each named input is.

    Raises CaptureError for a text of a form not known here; `guard_texts` gives none.

    Example:
        >>> (guard,) = read_guards(["L['x'].size()[0] != 1"], {"x": 0})
        >>> guard.holds([torch.ones(1, 3)])
        False
    """
    guards = []
    for text in texts:
        try:
            guards.append(SizeGuard(_readable(text), _reading(ast.parse(text, mode="eval").body, places)))
        except (SyntaxError, _Unknown) as error:
            raise CaptureError(
                f"the size guard {text} of the exported model cannot be read: {error}"
            ) from error
    return tuple(guards)


def guard_texts(program: ExportedProgram) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The conditions a program was exported under, in a form `read_guards` reads, and notes on sizes fixed.

    Raises CaptureError if this torch does not provide them and sizes may vary.
    """
    # The one place that reads this private name; tests/capture/test_size_guards.py watches it.
    texts = getattr(program, "_guards_code", None)
    if texts is None:
        if not program.range_constraints:
            return (), ()
        raise CaptureError(
            f"torch {torch.__version__} does not tell which conditions on sizes the exported model has;"
            " compile without dynamic_shapes"
        )
    places, flat = _example(program)
    remaining: list[str] = []
    notes: list[str] = []
    for text in (_by_graph_names(text, places) for text in texts):
        try:
            _reading(ast.parse(text, mode="eval").body, places)
            remaining.append(text)
        except (SyntaxError, _Unknown) as error:
            fixed = _fixed_sizes(text, places, flat)
            if not fixed:
                raise CaptureError(
                    f"the exported model holds only where {text}, which cannot be checked at a call ({error})"
                ) from error
            remaining += fixed
            notes.append(f"sizes are fixed ({', '.join(map(_readable, fixed))}): {error} in {text}")
    return tuple(dict.fromkeys(remaining)), tuple(notes)


def _example(program: ExportedProgram) -> tuple[dict[str, int], list[Any]]:
    """Where each named input stands in the flat call, and the flat example call."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {spec.arg.name: place for place, spec in enumerate(specs)}, pytree.tree_leaves(
        program.example_inputs
    )


def _by_graph_names(text: str, names: Iterable[str]) -> str:
    """The text with inputs called as the graph calls them: `L['input']` may be `input_1` there."""

    class Renamed(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            path = input_path(node)
            if path is None or path in names:
                return node if path else self.generic_visit(node)
            plain = re.sub(r"\W", "_", path).lower()
            matches = [name for name in names if re.fullmatch(rf"{plain}(_\d+)?", name)]
            return ast.parse(f"L[{matches[0]!r}]", mode="eval").body if len(matches) == 1 else node

    try:
        return ast.unparse(Renamed().visit(ast.parse(text, mode="eval")))
    except SyntaxError:
        return text


def _fixed_sizes(text: str, places: Mapping[str, int], flat: Sequence[Any]) -> list[str]:
    """For every size, stride or number of the call in a text, the guard that it is the example's."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return []
    fixed: dict[str, None] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript):
            continue
        try:
            value = _reading(node, places)(flat)
        except (_Unknown, IndexError):
            continue
        if isinstance(value, int):
            fixed[f"{ast.unparse(node)} == {int(value)}"] = None
    return list(fixed)


def check_guards(guards: Sequence[SizeGuard], flat: Sequence[Any]) -> None:
    """Raise InputError where a call does not meet a condition the graph was made under."""
    for guard in guards:
        if not holds(guard, flat):
            raise InputError(
                f"the call does not meet {guard.text}: for these sizes, the model takes another"
                " branch than the compiled one; compile it again with an example of these sizes"
            )


def holds(guard: SizeGuard, flat: Sequence[Any]) -> bool:
    """Whether a condition is met; a condition that cannot be computed is not."""
    try:
        return bool(guard.holds(flat))
    except (ArithmeticError, ValueError):  # the model itself would fail there, such as by dividing by zero
        return False


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
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            inner, change = read(operand), _UNARY[type(op)]
            return lambda flat: change(inner(flat))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, yes, no = read(test), read(body), read(orelse)
            return lambda flat: yes(flat) if condition(flat) else no(flat)
        case ast.Call(func=function, args=args, keywords=[]) if ast.unparse(function) in _CALLS:
            parts, call = [read(arg) for arg in args], _CALLS[ast.unparse(function)]
            return lambda flat: call(*(part(flat) for part in parts))
        case ast.Name() | ast.Attribute() if ast.unparse(node) in _CONSTANTS:
            constant = _CONSTANTS[ast.unparse(node)]
            return lambda flat: constant
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

"""Terms: what a pattern looks for, and which constants and layers are equal."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Tensor
from intarsia.network.infer import attribute_defaults
from intarsia.network.ops import COMMUTATIVE, MAY_BE_IDENTITY

# The terms a rule's pattern is written in: variables, operators, constants, alternatives.


class Term:
    """The description of a tensor in a pattern; a term used twice is the same tensor."""


@dataclass(frozen=True, eq=False)
class Var(Term):
    """Any tensor, or with `constant` only constants. The same name is the same tensor."""

    name: str
    constant: bool = False


@dataclass(frozen=True, eq=False)
class Number(Term):
    """A constant that holds this number alone."""

    value: float


@dataclass(frozen=True, eq=False)
class Maybe(Term):
    """An input that may be left out; its variables are then None."""

    term: Term


@dataclass(frozen=True, eq=False)
class Either(Term):
    """The first of these that matches; variables of the others are None."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class OpTerm(Term):
    """The result of an operator for these inputs.

    Attributes not mentioned must hold their default. `shared` lets layers outside the match read it.
    """

    kind: str
    inputs: tuple[Term | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    any_attributes: bool = False
    any_inputs: bool = False
    shared: bool = False

    def __getitem__(self, index: int) -> Output:
        return Output(self, index)

    def __iter__(self) -> Iterator[Term]:
        raise TypeError(f"{self.kind} is one output; write {self.kind}(...)[0], {self.kind}(...)[1]")


@dataclass(frozen=True, eq=False)
class Output(Term):
    """One of several results of a layer."""

    call: OpTerm
    index: int


class AnyValue:
    """Matches any value of an attribute: `op.Softmax(x, axis=op.any)`."""

    def __repr__(self) -> str:
        return "any"


class OpBuilder:
    """`op` in a pattern: `op.Add(a, b)` is the term of an Add of two terms.

    Keywords are attributes, to be equal to a value, to satisfy a function, or `op.any`. A leading
    underscore marks what is no attribute: `_name="conv"` hands the layer to the rule under that name,
    `_any_attributes=True` and `_any_inputs=True` ask nothing of what is not mentioned, `_shared=True`
    allows other readers of this interior value.
    """

    any: AnyValue = AnyValue()

    def __init__(self, domain: str = "") -> None:
        self._domain = domain

    def domain(self, name: str) -> OpBuilder:
        """Operators of another domain: `op.domain("com.microsoft").BiasGelu(x, b)`."""
        return OpBuilder(name)

    def constant(self, var: Any) -> Term:
        """This variable, where it is a constant."""
        if not isinstance(var, Var):
            raise RewriteError(f"op.constant() takes a variable of the pattern, not {var!r}")
        return Var(var.name, constant=True)

    def maybe(self, term: Any) -> Term:
        return Maybe(_term(term))

    def either(self, *terms: Any) -> Term:
        return Either(tuple(_term(term) for term in terms))

    def __getattr__(self, op_type: str) -> Callable[..., OpTerm]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        kind = f"{self._domain}::{op_type}" if self._domain else op_type

        def call(*inputs: Any, **keywords: Any) -> OpTerm:
            options = {name: keywords.pop(name) for name in list(keywords) if name.startswith("_")}
            known = {"_name", "_any_attributes", "_any_inputs", "_shared"}
            if unknown := set(options) - known:
                raise RewriteError(f"{op_type} has no option {sorted(unknown)}; there are {sorted(known)}")
            attributes = {name.removeprefix("_"): value for name, value in options.items()}
            return OpTerm(
                kind, tuple(None if x is None else _term(x) for x in inputs), keywords, **attributes
            )

        return call


def _term(value: Any) -> Term:
    if isinstance(value, Term):
        return value
    if isinstance(value, bool | int | float):
        return Number(float(value))
    raise RewriteError(f"{value!r} cannot be part of a pattern")


Root = OpTerm | Output | Either  # alternatives of a root are calls


def build(pattern: Callable[..., Any]) -> tuple[tuple[Root, ...], list[str]]:
    """The roots of a pattern written as a function, and the names of its variables."""
    names = list(inspect.signature(pattern).parameters)[1:]
    result = pattern(OpBuilder(), *(Var(name) for name in names))
    roots = result if isinstance(result, tuple) else (result,)
    for root in roots:
        alternatives = root.terms if isinstance(root, Either) else (root,)
        if not all(isinstance(term, OpTerm | Output) for term in alternatives):
            raise RewriteError(f"a pattern is the result of an operator, not {root!r}")
    return roots, names


def kinds(root: Root) -> list[str]:
    """The operators whose result a root may be."""
    if isinstance(root, Either):
        return [kind for term in root.terms if isinstance(term, OpTerm | Output) for kind in kinds(term)]
    return [(root.call if isinstance(root, Output) else root).kind]


def depth(term: Term | None) -> int:
    """The number of layers on the longest way down a term."""
    if isinstance(term, OpTerm):
        return 1 + max((depth(item) for item in term.inputs), default=0)
    if isinstance(term, Output):
        return depth(term.call)
    if isinstance(term, Maybe):
        return depth(term.term)
    if isinstance(term, Either):
        return max(depth(item) for item in term.terms)
    return 0


def parts(terms: Sequence[Term]) -> list[Term]:
    """Every term of these, each once as often as it is written; a shared operator once."""
    collected: list[Term] = []
    seen: set[OpTerm] = set()

    def visit(term: Term | None) -> None:
        if term is None or term in seen:
            return
        collected.append(term)
        if isinstance(term, OpTerm):
            seen.add(term)
            for item in term.inputs:
                visit(item)
        elif isinstance(term, Output):
            visit(term.call)
        elif isinstance(term, Maybe):
            visit(term.term)
        elif isinstance(term, Either):
            for item in term.terms:
                visit(item)

    for term in terms:
        visit(term)
    return collected


def symmetric_operators(roots: Sequence[Root]) -> frozenset[OpTerm]:
    """The commutative operators of two variables that stand nowhere else in the pattern."""
    terms = parts(roots)
    seen = Counter(term.name for term in terms if isinstance(term, Var))
    return frozenset(
        term
        for term in terms
        if isinstance(term, OpTerm)
        and term.kind in COMMUTATIVE
        and all(isinstance(item, Var) and not item.constant and seen[item.name] == 1 for item in term.inputs)
    )


def feeders(root: Root) -> dict[str, tuple[frozenset[str], ...]]:
    """By kind of root: groups of operators, of each of which one must feed a root that matches."""
    calls = root.terms if isinstance(root, Either) else (root,)
    kinds: dict[str, tuple[frozenset[str], ...]] = {}
    for term in calls:
        call = term.call if isinstance(term, Output) else term
        assert isinstance(call, OpTerm)
        groups = tuple(group | MAY_BE_IDENTITY for item in call.inputs if (group := _makers(item)))
        kinds[call.kind] = () if call.kind in kinds else groups
    return kinds


def _makers(term: Term | None) -> frozenset[str]:
    """The operators that may make what a term matches; empty if others may."""
    if isinstance(term, OpTerm):
        return frozenset({term.kind.rpartition("::")[2]})
    if isinstance(term, Output):
        return _makers(term.call)
    if isinstance(term, Either):
        groups = [_makers(item) for item in term.terms]
        return frozenset().union(*groups) if all(groups) else frozenset()
    return frozenset()


# What counts as equal when a pattern is matched: numbers, attributes, layers that change nothing.


def holds(value: ir.Value, number: float) -> bool:
    """Whether a tensor is a constant of one element, equal to `number` in its dtype."""
    array = value.const_value
    if array is None or array.size != 1:
        return False
    has = float(np.asarray(array.numpy()).astype(np.float64).ravel()[0])
    if array.dtype.is_integer() or number in (0.0, 1.0, 2.0, 0.5):
        return has == number
    tolerance = {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}.get(array.dtype, 1e-6)
    return abs(has - number) <= tolerance * abs(number)


def is_transparent(node: ir.Node) -> bool:
    """Whether a layer returns its first input unchanged."""
    op_type = node.op_type
    if op_type not in MAY_BE_IDENTITY or node.domain or not node.inputs or node.inputs[0] is None:
        return False
    if op_type == "Identity":
        return True
    source, result = node.inputs[0], node.outputs[0]
    if op_type == "Cast":
        return source.dtype == result.dtype
    if op_type in ("Reshape", "Expand", "Flatten"):
        if source.shape is None or result.shape is None:
            return False
        a, b = Tensor.of(source).shape, Tensor.of(result).shape
        # With one size unknown the others fix it for Reshape; it is then the same on both sides.
        return a == b and (None not in a or (op_type == "Reshape" and a.count(None) == 1 and 0 not in a))
    order = node.attributes.get("perm")  # of a Transpose
    return order is not None and list(order.value) == list(range(len(order.value)))


def see_through(value: ir.Value | None) -> ir.Value | None:
    """The tensor before layers that change nothing."""
    while value is not None and (node := value.producer()) is not None and is_transparent(node):
        value = node.inputs[0]
    return value


def odd_attribute(term: OpTerm, node: ir.Node) -> tuple[Any, ...] | None:
    """The first attribute that is not what the pattern asks for: a message and its parts, or None."""
    wanted, attributes = term.attributes, node.attributes
    if not wanted and not attributes:
        return None
    defaults = attribute_defaults(node.domain, node.op_type)
    rank = _rank(node)
    for name, value in wanted.items():
        attr = attributes.get(name)
        has = defaults.get(name) if attr is None else attr.value
        if not _agrees(name, value, has, rank):
            asked = "what it should be" if callable(value) else repr(value)
            return ("{} of {} is {}, not {}", name, node, plain(has), asked)
    if term.any_attributes:
        return None
    for name, attr in attributes.items():
        if name not in wanted and not _agrees(name, defaults.get(name), attr.value, rank):
            return ("{} has {}={!r}, which the pattern does not mention", node, name, plain(attr.value))
    return None


def _agrees(name: str, wanted: Any, has: Any, rank: int) -> bool:
    if isinstance(wanted, AnyValue):
        return True
    has = plain(has)
    if callable(wanted):
        return bool(wanted(has))
    if name == "axis" and isinstance(wanted, int) and isinstance(has, int) and rank:
        return wanted % rank == has % rank
    if isinstance(wanted, float) and isinstance(has, float):
        return abs(wanted - has) <= 1e-6 * abs(wanted)
    return bool(plain(wanted) == has)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _rank(node: ir.Node) -> int:
    first = node.inputs[0] if node.inputs else None
    return 0 if first is None or first.shape is None else len(first.shape)

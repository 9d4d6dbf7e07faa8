"""Matching terms against a network, with backtracking, and the reason of the nearest miss."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.network import Tensor
from intarsia.network.raw import attributes_of, inputs_of, kind_of, outputs_of, producer_of
from intarsia.network.schema import schema_of
from intarsia.network.uses import readers, use_count
from intarsia.rewrite.term import (
    COMMUTATIVE,
    Any_,
    Call,
    Either,
    Maybe,
    Number,
    Output,
    Root,
    Term,
    Var,
    kinds,
    parts,
)

_SOLUTIONS = 16  # ways to match one layer that are tried before giving up
_READERS = 64  # readers of a tensor among which a further output of a pattern is looked for

Goal = tuple[Term | None, ir.Value | None]


class Found:
    """One way a pattern matches: variables, named layers, and the layers of the match."""

    __slots__ = ("layers", "nodes", "roots", "variables")

    def __init__(self, *roots: ir.Value) -> None:
        self.variables: dict[str, ir.Value | None] = {}
        self.nodes: dict[Call, ir.Node] = {}
        self.layers: dict[ir.Node, bool] = {}  # whether others may read it
        self.roots = list(roots)

    def copy(self) -> Found:
        other = Found()
        other.variables, other.nodes = dict(self.variables), dict(self.nodes)
        other.layers, other.roots = dict(self.layers), list(self.roots)
        return other


class Matcher:
    """Matches one pattern: yields every way in which it matches at a layer.

    `miss`, once something failed, is how far the nearest miss came and why it was one.
    """

    def __init__(self, roots: Sequence[Root], *, explain: bool = False) -> None:
        self._roots = roots
        self._explain = explain
        self._even = _even_calls(roots)
        self._plain = _is_plain(roots, self._even) and not explain
        self._all = True
        self.miss: tuple[int, str] = (-1, "")

    def first(self, node: ir.Node) -> Found | None:
        """The first way in which the pattern matches, or None."""
        if not self._plain:
            return next(self.at(node), None)
        root = self._roots[0]
        assert type(root) is Call
        state = Found(node.outputs[0])
        if not self._straight(root, node, state) or (len(state.layers) > 1 and not self._closed(state)):
            return None
        return state

    def _straight(self, term: Call, node: ir.Node, state: Found) -> bool:
        """Match a pattern in which nothing is to be chosen: plainly downwards."""
        state.nodes[term] = node
        state.layers[node] = term.shared
        if (term.attributes or attributes_of(node)) and not self._attributes(term, node, state):
            return False
        values = inputs_of(node)
        if len(values) != len(term.inputs):
            return False
        for inner, value in zip(term.inputs, values, strict=True):
            if type(inner) is Var:
                if not self._bind(inner, value, state):
                    return False
            elif type(inner) is Call:
                below = None if value is None else producer_of(value)
                while below is not None and kind_of(below) != inner.kind:
                    if not is_transparent(below):
                        return False
                    state.layers[below] = inner.shared
                    value = below.inputs[0]
                    below = None if value is None else producer_of(value)
                if below is None or value is None or value.index() != 0:
                    return False
                if not self._straight(inner, below, state):
                    return False
            elif not self._step(inner, value, state, [], []):
                return False
        return True

    def at(self, node: ir.Node) -> Iterator[Found]:
        """Every way in which the pattern matches."""
        first = self._roots[0]
        index = first.index if isinstance(first, Output) else 0
        if index >= len(node.outputs):
            return
        value = node.outputs[index]
        # Whichever way round two free variables go, an operator of both matches: the other way is for
        # rules that refuse the first, and costs nothing until then.
        if self._even:
            self._all = False
            found = next(self._solve(Found(value), [(first, value)]), None)
            self._all = True
            if found is None:
                return
            yield found
        solutions = self._solve(Found(value), [(first, value)])
        if self._even:
            next(solutions, None)
        yield from solutions

    def _solve(self, state: Found, goals: list[Goal]) -> Iterator[Found]:
        # Each choice is a state and the goals left in it; the last one made is tried first.
        choices: list[tuple[Found, list[Goal]]] = [(state, goals)]
        yielded = 0
        while choices and yielded < _SOLUTIONS:
            state, goals = choices.pop()
            while goals:
                term, value = goals.pop()
                if not self._step(term, value, state, goals, choices):
                    break
            else:
                if len(state.roots) < len(self._roots):
                    self._next_root(state, choices)
                elif self._closed(state):
                    yielded += 1
                    yield state

    def _step(
        self,
        term: Term | None,
        value: ir.Value | None,
        state: Found,
        goals: list[Goal],
        choices: list[tuple[Found, list[Goal]]],
    ) -> bool:
        if type(term) is Var:
            return self._bind(term, value, state)
        if type(term) is Call:
            return self._call(term, 0, value, state, goals, choices)
        if type(term) is Output:
            return self._call(term.call, term.index, value, state, goals, choices)
        if type(term) is Number:
            if value is not None and holds(value, term.value):
                return True
            return self._fail(state, "{} is not the constant {:g}", value, term.value)
        if type(term) is Maybe:
            if value is None:
                return True
            goals.append((term.term, value))
            return True
        if type(term) is Either:
            for other in reversed(term.terms[1:]):
                choices.append((state.copy(), [*goals, (other, value)]))
            goals.append((term.terms[0], value))
            return True
        return value is None or self._fail(state, "{} is given where nothing should be", value)

    def _bind(self, var: Var, value: ir.Value | None, state: Found) -> bool:
        name = var.name
        if value is None:
            return self._fail(state, "the input {} is missing", name)
        if var.constant and value.const_value is None:
            return self._fail(state, "{} is {}, which is not constant", name, value)
        bound = state.variables.setdefault(name, value)
        if bound is value or see_through(bound) is see_through(value):
            return True
        return self._fail(state, "{} is both {} and {}", name, bound, value)

    def _call(
        self,
        term: Call,
        index: int,
        value: ir.Value | None,
        state: Found,
        goals: list[Goal],
        choices: list[tuple[Found, list[Goal]]],
    ) -> bool:
        node = None if value is None else value.producer()
        skipped: list[ir.Node] = []
        while node is not None and kind_of(node) != term.kind:
            if not is_transparent(node):
                return self._fail(state, "{} is made by {}, not {}", value, node.op_type, term.kind)
            skipped.append(node)
            value = node.inputs[0]
            node = None if value is None else value.producer()
        if node is None or value is None:
            return self._fail(state, "{} is not made by {}", value, term.kind)
        if value.index() != index:
            return self._fail(state, "{} is output {} of {}, not {}", value, value.index(), node, index)
        seen = state.nodes.get(term)
        if seen is not None:
            return seen is node or self._fail(state, "{} should be {}", node, seen)
        state.nodes[term] = node
        for other in skipped:
            state.layers[other] = term.shared
        state.layers[node] = term.shared
        if not self._attributes(term, node, state):
            return False
        return self._inputs(term, node, state, goals, choices)

    def _attributes(self, term: Call, node: ir.Node, state: Found) -> bool:
        wanted, attributes = term.attributes, node.attributes
        if not wanted and not attributes:
            return True
        defaults = _defaults(node.domain, node.op_type)
        rank = _rank(node)
        for name, value in wanted.items():
            attr = attributes.get(name)
            has = defaults.get(name) if attr is None else attr.value
            if not _agrees(name, value, has, rank):
                asked = "what it should be" if callable(value) else repr(value)
                return self._fail(state, "{} of {} is {}, not {}", name, node, _plain(has), asked)
        if term.any_attributes:
            return True
        for name, attr in attributes.items():
            if name not in wanted and not _agrees(name, defaults.get(name), attr.value, rank):
                has = _plain(attr.value)
                return self._fail(
                    state, "{} has {}={!r}, which the pattern does not mention", node, name, has
                )
        return True

    def _inputs(
        self,
        term: Call,
        node: ir.Node,
        state: Found,
        goals: list[Goal],
        choices: list[tuple[Found, list[Goal]]],
    ) -> bool:
        terms, values = term.inputs, node.inputs
        if (
            len(values) > len(terms)
            and not term.any_inputs
            and any(v is not None for v in values[len(terms) :])
        ):
            message = "{} has {} inputs, the pattern's {} has {}"
            return self._fail(state, message, node, len(values), term.kind, len(terms))
        padded = [*values[: len(terms)], *[None] * (len(terms) - len(values))]
        if (
            term.kind in COMMUTATIVE
            and len(terms) == 2
            and values[0] is not values[1]
            and (self._all or term not in self._even)
        ):
            swapped: list[Goal] = [*goals, (terms[1], padded[0]), (terms[0], padded[1])]
            choices.append((state.copy(), swapped))
        # The goal tried next is the last: operators fail sooner than variables, so they come last.
        goals += reversed(list(zip(terms, padded, strict=True)))
        return True

    def _next_root(self, state: Found, choices: list[tuple[Found, list[Goal]]]) -> None:
        """Look for the pattern's next output among what is made from tensors already matched."""
        term = self._roots[len(state.roots)]
        taken = {value.producer() for value in state.roots}
        found = False
        # The choice made last is tried first, so the nearest in order comes last.
        for value in reversed(dict.fromkeys(self._candidates(term, state))):
            if value.producer() in taken:
                continue
            found = True
            branch = state.copy()
            branch.roots.append(value)
            choices.append((branch, [(term, value)]))
        if not found:
            self._fail(state, "no further {} of the pattern is there", " or ".join(kinds(term)))

    def _candidates(self, term: Term | None, state: Found) -> Iterator[ir.Value]:
        if isinstance(term, Var):
            value = state.variables.get(term.name)
            if value is not None:
                yield value
            return
        if isinstance(term, Either):
            for other in term.terms:
                yield from self._candidates(other, state)
        if not isinstance(term, Call | Output):
            return
        call, index = (term.call, term.index) if isinstance(term, Output) else (term, 0)
        if call in state.nodes:
            yield state.nodes[call].outputs[index]
            return
        for inner in call.inputs:
            for value in self._candidates(inner, state):
                if value.const_value is not None or use_count(value) > _READERS:
                    continue
                for node, _ in value.uses():
                    if kind_of(node) == call.kind and index < len(node.outputs):
                        yield node.outputs[index]

    def _closed(self, state: Found) -> bool:
        """Whether layers outside the match read nothing of it but its outputs."""
        layers, roots = state.layers, state.roots
        for node, shared in layers.items():
            made = outputs_of(node)
            if shared or (len(made) == 1 and made[0] in roots):
                continue
            for value in made:
                if value in roots:
                    continue
                if value.is_graph_output():
                    return self._fail(state, "{} is an output of the network", value)
                count = use_count(value)
                if count == 0 or (count == 1 and len(made) == 1):
                    continue  # the one reader is the layer of the match it was reached from
                if count > sum([len(other.inputs) for other in layers]):
                    return self._fail(state, "{} is read by {} layers", value, count)
                for user in readers(value):
                    if user not in layers:
                        return self._fail(state, "{} is also read by {}", value, user)
        return True

    def _fail(self, state: Found, message: str, *parts: Any) -> bool:
        if self._explain and len(state.layers) > self.miss[0]:
            self.miss = (len(state.layers), message.format(*(_shown(part) for part in parts)))
        return False


def _even_calls(roots: Sequence[Root]) -> frozenset[Call]:
    """The commutative operators of two variables that stand nowhere else in the pattern."""
    seen = Counter(term.name for term in parts(roots) if isinstance(term, Var))
    return frozenset(
        term
        for term in parts(roots)
        if isinstance(term, Call)
        and term.kind in COMMUTATIVE
        and all(isinstance(item, Var) and not item.constant and seen[item.name] == 1 for item in term.inputs)
    )


def _is_plain(roots: Sequence[Root], even: frozenset[Call]) -> bool:
    """Whether there is nothing to choose: one root, no alternatives, no operator that stands twice."""
    terms = parts(roots)
    inner = [
        item for term in terms if isinstance(term, Call) for item in term.inputs if isinstance(item, Call)
    ]
    return (
        len(roots) == 1
        and isinstance(roots[0], Call)
        and all(isinstance(term, Call | Var | Number) for term in terms)
        and all(t.kind not in COMMUTATIVE or t in even for t in terms if isinstance(t, Call))
        and not any(term.any_inputs for term in terms if isinstance(term, Call))
        and len(inner) == len(set(inner))
    )


def holds(value: ir.Value, number: float) -> bool:
    """Whether a tensor is a constant of one element, equal to `number` as far as its dtype tells."""
    array = value.const_value
    if array is None or array.size != 1:
        return False
    has = float(np.asarray(array.numpy()).astype(np.float64).ravel()[0])
    if array.dtype.is_integer() or number in (0.0, 1.0, 2.0, 0.5):
        return has == number
    tolerance = {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}.get(array.dtype, 1e-6)
    return abs(has - number) <= tolerance * abs(number)


def is_transparent(node: ir.Node) -> bool:
    """Whether a layer hands on its first input unchanged."""
    op_type = node.op_type
    if node.domain or not node.inputs or node.inputs[0] is None:
        return False
    if op_type == "Identity":
        return True
    source, made = node.inputs[0], node.outputs[0]
    if op_type == "Cast":
        return source.dtype == made.dtype
    if op_type in ("Reshape", "Expand", "Flatten"):
        if source.shape is None or made.shape is None:
            return False
        a, b = Tensor.of(source).shape, Tensor.of(made).shape
        # With one size unknown the others fix it for Reshape; it is then the same on both sides.
        return a == b and (None not in a or (op_type == "Reshape" and a.count(None) == 1 and 0 not in a))
    if op_type == "Transpose":
        order = node.attributes.get("perm")
        return order is not None and list(order.value) == list(range(len(order.value)))
    return False


def see_through(value: ir.Value | None) -> ir.Value | None:
    """The tensor behind layers that change nothing."""
    while value is not None and (node := value.producer()) is not None and is_transparent(node):
        value = node.inputs[0]
    return value


@functools.cache
def _defaults(domain: str, op_type: str) -> dict[str, Any]:
    schema = schema_of(domain, op_type)
    return {} if schema is None else schema.defaults


def _agrees(name: str, wanted: Any, has: Any, rank: int) -> bool:
    if isinstance(wanted, Any_):
        return True
    has = _plain(has)
    if callable(wanted):
        return bool(wanted(has))
    if name == "axis" and isinstance(wanted, int) and isinstance(has, int) and rank:
        return wanted % rank == has % rank
    if isinstance(wanted, float) and isinstance(has, float):
        return abs(wanted - has) <= 1e-6 * abs(wanted)
    return bool(_plain(wanted) == has)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _rank(node: ir.Node) -> int:
    first = node.inputs[0] if node.inputs else None
    return 0 if first is None or first.shape is None else len(first.shape)


def _shown(part: Any) -> Any:
    if part is None:
        return "a missing input"
    return part.name if isinstance(part, ir.Value | ir.Node) else part

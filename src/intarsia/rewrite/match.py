"""Matching a term against a network: what it is bound to, or why the nearest try failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.network.ops import COMMUTATIVE
from intarsia.network.text import kind_of
from intarsia.rewrite.term import (
    Either,
    Maybe,
    Number,
    OpTerm,
    Output,
    Root,
    Term,
    Var,
    holds,
    is_transparent,
    kinds,
    odd_attribute,
    see_through,
    symmetric_operators,
)

# What a pattern is bound to where it matches: its variables, its layers, and who else reads of them.


class Bindings:
    """One way a pattern matches: variables, named layers, and the layers of the match."""

    __slots__ = ("layers", "nodes", "roots", "variables")

    def __init__(self, *roots: ir.Value) -> None:
        self.variables: dict[str, ir.Value | None] = {}
        self.nodes: dict[OpTerm, ir.Node] = {}
        self.layers: dict[ir.Node, bool] = {}  # whether others may read it
        self.roots: list[ir.Value] = list(roots)

    def copy(self) -> Bindings:
        other = Bindings()
        other.variables, other.nodes = dict(self.variables), dict(self.nodes)
        other.layers, other.roots = dict(self.layers), list(self.roots)
        return other


def outside_read(state: Bindings) -> tuple[Any, ...] | None:
    """A value inside the match that outside layers read: a message and its parts, or None."""
    layers, roots = state.layers, state.roots
    for node, shared in layers.items():
        if shared:
            continue
        for value in node.outputs:
            if value in roots:
                continue
            if value.is_graph_output():
                return ("{} is an output of the network", value)
            uses = value.uses()
            if len(uses) <= 1 and len(node.outputs) == 1:
                continue  # the one reader is the layer of the match it was reached from
            if len(uses) > sum(len(other.inputs) for other in layers):
                return ("{} is read by {} layers", value, len(uses))
            for user, _ in uses:
                if user not in layers:
                    return ("{} is also read by {}", value, user)
    return None


# Matching terms against a network, with backtracking, and the reason of the nearest miss.


_SOLUTIONS = 16  # ways to match one layer that are tried before giving up
_READERS = 64  # readers of a tensor among which a further output of a pattern is looked for

Goal = tuple[Term | None, ir.Value | None]


class Matcher:
    """Matches one pattern: yields every way in which it matches at a layer.

    `miss`, once something failed, is how far the nearest miss came and why it was one.
    """

    def __init__(self, roots: Sequence[Root], *, explain: bool = False) -> None:
        self._roots = roots
        self._explain = explain
        self._symmetric = symmetric_operators(roots)
        self._all = True
        self.miss: tuple[int, str] = (-1, "")

    def at(self, node: ir.Node) -> Iterator[Bindings]:
        """Every way in which the pattern matches."""
        first = self._roots[0]
        index = first.index if isinstance(first, Output) else 0
        if index >= len(node.outputs):
            return
        value = node.outputs[index]
        # Whichever way round two free variables go, an operator of both matches: the other way is for
        # rules that refuse the first, and costs nothing until then.
        if self._symmetric:
            self._all = False
            try:
                bindings = next(self._solve(Bindings(value), [(first, value)]), None)
            finally:
                self._all = True
            if bindings is None:
                return
            yield bindings
        solutions = self._solve(Bindings(value), [(first, value)])
        if self._symmetric:
            next(solutions, None)
        yield from solutions

    def _solve(self, state: Bindings, goals: list[Goal]) -> Iterator[Bindings]:
        # Each choice is a state and the goals left in it; the last one made is tried first.
        choices: list[tuple[Bindings, list[Goal]]] = [(state, goals)]
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
        state: Bindings,
        goals: list[Goal],
        choices: list[tuple[Bindings, list[Goal]]],
    ) -> bool:
        if type(term) is Var:
            return self._bind(term, value, state)
        if type(term) is OpTerm:
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
        return value is None or self._fail(state, "{} is passed where the pattern has no input", value)

    def _bind(self, var: Var, value: ir.Value | None, state: Bindings) -> bool:
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
        term: OpTerm,
        index: int,
        value: ir.Value | None,
        state: Bindings,
        goals: list[Goal],
        choices: list[tuple[Bindings, list[Goal]]],
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

    def _attributes(self, term: OpTerm, node: ir.Node, state: Bindings) -> bool:
        odd = odd_attribute(term, node)
        return odd is None or self._fail(state, *odd)

    def _inputs(
        self,
        term: OpTerm,
        node: ir.Node,
        state: Bindings,
        goals: list[Goal],
        choices: list[tuple[Bindings, list[Goal]]],
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
            and (self._all or term not in self._symmetric)
        ):
            swapped: list[Goal] = [*goals, (terms[1], padded[0]), (terms[0], padded[1])]
            choices.append((state.copy(), swapped))
        # The goal tried next is the last: operators fail sooner than variables, so they come last.
        goals += reversed(list(zip(terms, padded, strict=True)))
        return True

    def _next_root(self, state: Bindings, choices: list[tuple[Bindings, list[Goal]]]) -> None:
        """Look for the pattern's next output among what is made from tensors already matched."""
        term = self._roots[len(state.roots)]
        taken = {value.producer() for value in state.roots}
        any_found = False
        # The choice made last is tried first, so the nearest in order comes last.
        for value in reversed(dict.fromkeys(self._candidates(term, state))):
            if value.producer() in taken:
                continue
            any_found = True
            branch = state.copy()
            branch.roots.append(value)
            choices.append((branch, [(term, value)]))
        if not any_found:
            self._fail(state, "there is no further {} for the pattern", " or ".join(kinds(term)))

    def _candidates(self, term: Term | None, state: Bindings) -> Iterator[ir.Value]:
        if isinstance(term, Var):
            value = state.variables.get(term.name)
            if value is not None:
                yield value
            return
        if isinstance(term, Either):
            for other in term.terms:
                yield from self._candidates(other, state)
        if not isinstance(term, OpTerm | Output):
            return
        call, index = (term.call, term.index) if isinstance(term, Output) else (term, 0)
        if call in state.nodes:
            yield state.nodes[call].outputs[index]
            return
        for inner in call.inputs:
            for value in self._candidates(inner, state):
                uses = value.uses()
                if value.const_value is not None or len(uses) > _READERS:
                    continue
                for node, _ in uses:
                    if kind_of(node) == call.kind and index < len(node.outputs):
                        yield node.outputs[index]

    def _closed(self, state: Bindings) -> bool:
        """Whether layers outside the match read nothing of it but its outputs."""
        leak = outside_read(state)
        return leak is None or self._fail(state, *leak)

    def _fail(self, state: Bindings, message: str, *parts: Any) -> bool:
        if self._explain and len(state.layers) > self.miss[0]:
            self.miss = (len(state.layers), message.format(*(_shown(part) for part in parts)))
        return False


def _shown(part: Any) -> Any:
    if part is None:
        return "a missing input"
    return part.name if isinstance(part, ir.Value | ir.Node) else part

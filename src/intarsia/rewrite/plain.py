"""Matching a pattern in which nothing is to be chosen: straight down, without backtracking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx_ir as ir

from intarsia.network.raw import (
    attribute_data,
    constant_of,
    domain_of,
    inputs_of,
    op_type_of,
    outputs_of,
    producer_of,
)
from intarsia.rewrite.alike import holds, is_transparent, odd_attribute, see_through
from intarsia.rewrite.found import Found, leaks
from intarsia.rewrite.term import COMMUTATIVE, Call, Number, Root, Var, parts


def first_match(root: Call, node: ir.Node) -> Found | None:
    """The way a plain pattern matches at a layer, which is of its kind; None if it does not."""
    state = Found(outputs_of(node)[0])
    if not _straight(root, node, state) or (len(state.layers) > 1 and leaks(state) is not None):
        return None
    return state


def _straight(term: Call, node: ir.Node, state: Found) -> bool:
    state.nodes[term] = node
    state.layers[node] = term.shared
    if (attribute_data(node) or term.attributes) and odd_attribute(term, node) is not None:
        return False
    values, inputs = inputs_of(node), term.inputs
    if len(values) != len(inputs):
        return False
    for inner, value in zip(inputs, values, strict=True):
        if value is None:
            return False
        if type(inner) is Var:
            if inner.constant and constant_of(value) is None:
                return False
            bound = state.variables.setdefault(inner.name, value)
            if bound is not value and see_through(bound) is not see_through(value):
                return False
        elif type(inner) is Call:
            below = producer_of(value)
            while below is not None and (
                op_type_of(below) != inner.op_type or domain_of(below) != inner.domain
            ):
                if not is_transparent(below):
                    return False
                state.layers[below] = inner.shared
                value = below.inputs[0]
                below = None if value is None else producer_of(value)
            if below is None or outputs_of(below)[0] is not value or not _straight(inner, below, state):
                return False
        elif type(inner) is not Number or not holds(value, inner.value):
            return False
    return True


def even_calls(roots: Sequence[Root]) -> frozenset[Call]:
    """The commutative operators of two variables that stand nowhere else in the pattern."""
    seen = Counter(term.name for term in parts(roots) if isinstance(term, Var))
    return frozenset(
        term
        for term in parts(roots)
        if isinstance(term, Call)
        and term.kind in COMMUTATIVE
        and all(isinstance(item, Var) and not item.constant and seen[item.name] == 1 for item in term.inputs)
    )


def is_plain(roots: Sequence[Root]) -> bool:
    """Whether there is nothing to choose: one root, no alternatives, no operator that stands twice."""
    terms, even = parts(roots), even_calls(roots)
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

"""A plain pattern made into one Python function, which asks of a layer only what the pattern asks.

Most layers a pattern is tried at are no match, and most matches are straightforward. The function made
here settles those; whatever needs a second look (layers seen through, other readers inside the match)
it leaves to the matcher, so that it can be wrong about nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.network import Layer, Network, Tensor
from intarsia.network.schema import schema_of
from intarsia.rewrite.equality import TRANSPARENT, holds, odd_attribute
from intarsia.rewrite.term import COMMUTATIVE, Call, Number, Root, Var, parts

Straight = Callable[[ir.Node], Any]


def straight(roots: Sequence[Root], wanted: Sequence[str], slow: Straight) -> Straight | None:
    """A function of a layer of the pattern's kind; None if the pattern leaves something to choose.

    It gives what is wanted by name, tensors of variables and named layers, or the layer where nothing is
    wanted; None where the pattern does not match; and what `slow` gives where that is not plain to see.
    """
    root = roots[0]
    if not isinstance(root, Call) or not _is_plain(roots):
        return None
    writer = _Writer(slow)
    writer.call(root, "node")
    known = writer.known
    if any(name not in known for name in wanted):
        return None
    for place, name in enumerate(wanted):
        writer.lines.append(f"g{place} = new({'Layer' if name in writer.layers else 'Tensor'})")
        writer.lines.append(f"g{place}.{'node' if name in writer.layers else 'value'} = {known[name]}")
    given = "".join(f"g{place}, " for place in range(len(wanted)))
    source = "\n    ".join(["def match(node):", *writer.lines, f"return ({given or 'node, '})"])
    exec(compile(source, "<pattern>", "exec"), writer.names)
    return writer.names["match"]  # type: ignore[no-any-return]


def spread(function: Callable[..., Any], wanted: Sequence[str]) -> Callable[[Network, Any], Any]:
    """A function of a network and a tuple of what is wanted: `function(net, *found)` at half the price."""
    names: dict[str, Any] = {"function": function}
    given = "".join(f"found[{place}], " for place in range(len(wanted)))
    exec(compile(f"def call(net, found):\n    return function(net, {given})", "<pattern>", "exec"), names)
    return names["call"]  # type: ignore[no-any-return]


class _Writer:
    """The lines of the function, and the objects they name."""

    def __init__(self, slow: Straight) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "slow": slow,
            "TRANSPARENT": TRANSPARENT,
            "holds": holds,
            "odd_attribute": odd_attribute,
            "new": object.__new__,
            "Layer": Layer,
            "Tensor": Tensor,
        }
        self.layers: set[str] = set()
        self.known: dict[str, str] = {}
        self._count = 0

    def call(self, term: Call, node: str) -> None:
        """Lines that ask whether a layer of the right kind is as this term says."""
        say = self.lines.append
        schema = schema_of(term.domain, term.op_type)
        if schema is None or schema.max_outputs != 1:
            say(f"if len({node}._outputs) != 1: return slow(node)")
        if term.attributes or schema is None or schema.has_attributes:
            asked = "" if term.attributes else f"{node}._attributes.data and "
            say(f"if {asked}odd_attribute({self._object(term)}, {node}) is not None: return None")
        values = [self._local("v") for _ in term.inputs]
        say(f"if len({node}._inputs) != {len(values)}:")
        say(f"    return slow(node) if len({node}._inputs) > {len(values)} else None")
        if values:
            say(f"{', '.join(values)}, = {node}._inputs")
        if term.name is not None:
            self.known[term.name] = node
            self.layers.add(term.name)
        for value, inner in zip(values, term.inputs, strict=True):
            say(f"if {value} is None: return None")
            if isinstance(inner, Var):
                self._var(inner, value)
            elif isinstance(inner, Number):
                say(f"if not holds({value}, {inner.value!r}): return None")
            elif isinstance(inner, Call):
                self._inner(inner, value)

    def _var(self, term: Var, value: str) -> None:
        if term.constant:
            self.lines.append(f"if {value}._const_value is None: return None")
        before = self.known.setdefault(term.name, value)
        if before != value:
            self.lines.append(f"if {before} is not {value}: return slow(node)")

    def _inner(self, term: Call, value: str) -> None:
        below, say = self._local("n"), self.lines.append
        say(f"{below} = {value}._producer")
        say(f"if {below} is None: return None")
        say(f"if {below}._op_type != {term.op_type!r} or {below}._domain != {term.domain!r}:")
        say(f"    return slow(node) if {below}._op_type in TRANSPARENT else None")
        if not term.shared:
            say(f"if len({value}._uses) != 1 or {value}._is_graph_output: return slow(node)")
        self.call(term, below)

    def _local(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _object(self, item: object) -> str:
        name = self._local("t")
        self.names[name] = item
        return name


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


def _is_plain(roots: Sequence[Root]) -> bool:
    """Whether there is nothing to choose: one root, no alternatives, no operator that stands twice."""
    terms, even = parts(roots), even_calls(roots)
    inner = [
        item for term in terms if isinstance(term, Call) for item in term.inputs if isinstance(item, Call)
    ]
    return (
        len(roots) == 1
        and all(isinstance(term, Call | Var | Number) for term in terms)
        and all(t.kind not in COMMUTATIVE or t in even for t in terms if isinstance(t, Call))
        and not any(term.any_inputs for term in terms if isinstance(term, Call))
        and all(item is not None for term in terms if isinstance(term, Call) for item in term.inputs)
        and len(inner) == len(set(inner))
    )

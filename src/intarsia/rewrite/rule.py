"""`@rule`: a pattern written as the program that it matches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.edit.redirect import replace_value
from intarsia.rewrite.match import Bindings, Matcher
from intarsia.rewrite.pattern import PatternRewriter, Refusal
from intarsia.rewrite.term import OpTerm, Root, build, depth, feeders, kinds, parts

Function = Callable[..., Any]
_AS_IT_IS = Refusal("what it gives stands there already")


class Rule(PatternRewriter):
    """A pattern made by `@rule`. A call of it calls the decorated function."""

    refuses_from_afar = True  # the function may look at anything

    def __init__(self, pattern: Function, function: Function, *, name: str, keep_types: bool = True) -> None:
        roots, variables = build(pattern)
        self.roots: tuple[Root, ...] = roots
        super().__init__(name, kinds(self.roots[0]), keep_types=keep_types)
        self.function = function
        self.variables = variables
        # What a further output of the pattern looks like is decided beside the root, not above it.
        self.reach: int | None = depth(self.roots[0]) if len(self.roots) == 1 else None
        operators = [term for term in parts(self.roots) if isinstance(term, OpTerm)]
        self.inner_kinds = frozenset(term.kind for term in operators)
        self.fed_by = feeders(self.roots[0])
        self._matcher = Matcher(self.roots)
        self._named = {term.name: term for term in operators if term.name is not None}
        self._wanted = list(inspect.signature(function).parameters)[1:]
        known = {*variables, *self._named}
        if unknown := [wanted for wanted in self._wanted if wanted not in known]:
            raise RewriteError(f"rule {name!r} asks for {unknown}; its pattern has {sorted(known)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def find(self, layer: Layer) -> Any:
        return next(self._matcher.at(layer.node), None)

    def perform(self, layer: Layer, found: Bindings) -> bool | Refusal:
        """Call the function for each match until it does not refuse."""
        net = layer.network
        result = self.function(net, **self._bindings(found))
        if not isinstance(result, Refusal):
            return self._replace(net, found.roots, result)
        others = self._matcher.at(layer.node)
        next(others, None)
        # What it built before it refused is undone, and with it the chance of another match.
        while not net.journal and (other := next(others, None)) is not None:
            again = self.function(net, **self._bindings(other))
            if not isinstance(again, Refusal):
                return self._replace(net, other.roots, again)
        return result

    def why_not(self, layer: Layer) -> str:
        matcher = Matcher(self.roots, explain=True)
        for _ in matcher.at(layer.node):
            return "it matches"
        return matcher.miss[1] or "the pattern has no such output"

    def _bindings(self, match: Bindings) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        for name in self._wanted:
            if name in self._named:
                node = match.nodes.get(self._named[name])
                bound[name] = None if node is None else Layer(node)
            else:
                value = match.variables.get(name)
                bound[name] = None if value is None else Tensor.of(value)
        return bound

    def _replace(self, net: Network, roots: list[ir.Value], said: Any) -> bool | Refusal:
        outputs = said if isinstance(said, tuple | list) else (said,)
        if len(outputs) != len(roots) or not all(isinstance(tensor, Tensor) for tensor in outputs):
            raise RewriteError(f"the rule gave {said!r} where {len(roots)} tensor(s) should be")
        changed = [replace_value(net, old, new.value) for old, new in zip(roots, outputs, strict=True)]
        return any(changed) or _AS_IT_IS


def rule(
    pattern: Function, *, name: str | None = None, keep_types: bool = True
) -> Callable[[Function], Rule]:
    """Make a pattern of a function.

    `pattern` is the expression to match. Its first argument builds operators; the other arguments are
    variables. The decorated function receives the network, and the matched values that it names. It returns
    the replacement of the pattern's output, or `refuse(reason)`.

    >>> from intarsia.network import functional as F
    >>> from intarsia.rewrite import refuse, rule
    >>> @rule(lambda op, x, w, b: op.Add(op.MatMul(x, w), b))
    ... def linear(net, x, w, b):
    ...     if b.ndim != 1:
    ...         return refuse(f"bias has {b.ndim} dimensions")
    ...     return F.gemm(x, w, b)
    >>> linear.name
    'linear'
    """

    def decorate(function: Function) -> Rule:
        return Rule(pattern, function, name=name or function.__name__, keep_types=keep_types)

    return decorate

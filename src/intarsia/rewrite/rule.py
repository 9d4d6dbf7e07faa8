"""`@rule`: a pattern written as the program that it matches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.redirect import replace_value
from intarsia.rewrite.found import Found
from intarsia.rewrite.match import Matcher
from intarsia.rewrite.pattern import PatternRewriter, Refusal
from intarsia.rewrite.plain import first_match, is_plain
from intarsia.rewrite.term import Call, build, depth, kinds, parts

Function = Callable[..., Any]


class Rule(PatternRewriter):
    """A pattern made by `@rule`; calling it calls the function under the decorator."""

    def __init__(self, pattern: Function, function: Function, *, name: str, keep_types: bool = True) -> None:
        self.roots, variables = build(pattern)
        super().__init__(name, kinds(self.roots[0]), keep_types=keep_types)
        self.function = function
        self.variables = variables
        self.reach = max(depth(root) for root in self.roots)
        self._matcher = Matcher(self.roots)
        root = self.roots[0]
        self._plain = root if isinstance(root, Call) and is_plain(self.roots) else None
        self._named = {
            term.name: term for term in parts(self.roots) if isinstance(term, Call) and term.name is not None
        }
        self._wanted = list(inspect.signature(function).parameters)[1:]
        self._only_tensors = not any(name in self._named for name in self._wanted)
        known = {*variables, *self._named}
        if unknown := [wanted for wanted in self._wanted if wanted not in known]:
            raise RewriteError(f"rule {name!r} asks for {unknown}; its pattern has {sorted(known)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def find(self, layer: Layer) -> Any:
        if self._plain is not None:
            first = first_match(self._plain, layer.node)
        else:
            first = next(self._matcher.at(layer.node), None)
        return None if first is None else (first,)

    def perform(self, layer: Layer, found: Any) -> bool | Refusal:
        """Let the function act on the first match it does not refuse."""
        net = layer.network
        journal = net.journal
        solution: Found | None = found[0]
        others: Iterator[Found] | None = None
        refusal: Refusal | None = None
        while solution is not None:
            said = self.function(net, **self._bindings(solution))
            if type(said) is not Refusal:
                self._replace(net, solution, said)
                return True
            refusal = said if refusal is None else refusal
            if journal:
                return refusal  # it built something before it refused: all is undone
            if others is None:  # the first match was refused: see whether there are others
                others = self._matcher.at(layer.node)
                next(others, None)
            solution = next(others, None)
        return Refusal("nothing matched") if refusal is None else refusal

    def why_not(self, layer: Layer) -> str:
        matcher = Matcher(self.roots, explain=True)
        for _ in matcher.at(layer.node):
            return "it matches"
        return matcher.miss[1] or "the pattern has no such output"

    def _bindings(self, found: Found) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        if self._only_tensors:
            variables = found.variables
            for name in self._wanted:
                value = variables.get(name)
                bound[name] = None if value is None else Tensor.of(value)
            return bound
        for name in self._wanted:
            if name in self._named:
                node = found.nodes.get(self._named[name])
                bound[name] = None if node is None else Layer(node)
            else:
                value = found.variables.get(name)
                bound[name] = None if value is None else Tensor.of(value)
        return bound

    def _replace(self, net: Network, found: Found, said: Any) -> None:
        if type(said) is Tensor and len(found.roots) == 1:
            replace_value(net, found.roots[0], said.value)
            return
        made = said if isinstance(said, tuple | list) else (said,)
        if len(made) != len(found.roots) or not all(isinstance(tensor, Tensor) for tensor in made):
            raise RewriteError(f"the rule gave {said!r} where {len(found.roots)} tensor(s) should be")
        for old, new in zip(found.roots, made, strict=True):
            net.replace_all_uses(Tensor.of(old), new)


def rule(
    pattern: Function, *, name: str | None = None, keep_types: bool = True
) -> Callable[[Function], Rule]:
    """Make a pattern of a function.

    `pattern` is the program to be found: its first argument builds operators, the others are variables.
    The function under the decorator is given the network and what it asks for by name, and gives back
    what is to stand in the place of the pattern's output, or `refuse(reason)`.

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

"""Patterns: classes that change a network or read it, and functions under `@rule`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.edit.redirect import replace_value
from intarsia.rewrite.match import Bindings, Matcher
from intarsia.rewrite.term import OpTerm, Root, build, depth, feeders, kinds, parts


@dataclass(frozen=True)
class Refusal:
    """The refusal of a pattern, with its reason. Its truth value is false."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.reason


def refuse(reason: str) -> Refusal:
    """Return the reason why a pattern does not apply here.

    >>> bool(refuse("bias has 2 dimensions"))
    False
    """
    return Refusal(reason)


class PatternRewriter:
    """A rewriting pattern written as a class.

    With `separate_match_rewrite`, `match(layer)` decides and `rewrite(layer)` changes the network. Without
    it, `match_and_rewrite(layer)` does both and returns whether it changed something. `root_layer` are the
    kinds of layer to try (`{"Add", "com.microsoft::BiasGelu"}`), or None for all. New layers are inserted
    before the layer. `keep_types=False` is for a pattern that changes the shape or dtype of what it replaces;
    the types after it are then inferred again.

    `reach` is the number of layers that the pattern reads, including the root. After a refusal, the pattern
    is tried again only if something changed within this distance. None tries it again after any change.
    """

    reach: int | None = None
    refuses_from_afar = False  # whether it may refuse a match because of layers beyond its reach
    inner_kinds: frozenset[str] = frozenset()  # of layers that may stand in a match, besides the root
    # By kind of root: groups of operators; of each group at least one must be among those that feed the root.
    fed_by: Mapping[str, tuple[frozenset[str], ...]] = MappingProxyType({})

    def __init__(
        self,
        name: str,
        root_layer: Iterable[str] | None = None,
        separate_match_rewrite: bool = False,
        *,
        keep_types: bool = True,
    ) -> None:
        if isinstance(root_layer, str):
            raise RewriteError(f"root_layer of pattern {name!r} is a set of kinds, not {root_layer!r}")
        self.name = name
        self.root_layer: frozenset[str] | None = None if root_layer is None else frozenset(root_layer)
        self.separate_match_rewrite = separate_match_rewrite
        self.keep_types = keep_types
        self.args: Any = None

    def match(self, layer: Layer) -> bool | Refusal:
        raise NotImplementedError(f"pattern {self.name!r} has no match()")

    def rewrite(self, layer: Layer) -> None:
        raise NotImplementedError(f"pattern {self.name!r} has no rewrite()")

    def match_and_rewrite(self, layer: Layer) -> bool | Refusal:
        raise NotImplementedError(f"pattern {self.name!r} has no match_and_rewrite()")

    def find(self, layer: Layer) -> Any:
        """The match that `perform` needs for this layer; a false value if there is none."""
        return self.match(layer) if self.separate_match_rewrite else True

    def perform(self, layer: Layer, found: Any) -> bool | Refusal:
        """Rewrite the layer; false if this is not possible."""
        if not self.separate_match_rewrite:
            return self.match_and_rewrite(layer)
        self.rewrite(layer)
        return True

    def why_not(self, layer: Layer) -> str:
        """Why `find` returned no match."""
        match = self.find(layer)
        return match.reason if isinstance(match, Refusal) else "match() returned a false value"


class PatternAnalyzer:
    """An analysis pattern. `match(layer)` selects layers; `analyze(layers)` receives all of them."""

    def __init__(self, name: str, root_layer: Iterable[str] | None = None) -> None:
        self.name = name
        self.root_layer: frozenset[str] | None = None if root_layer is None else frozenset(root_layer)
        self.args: Any = None

    def match(self, layer: Layer) -> bool | Refusal:
        raise NotImplementedError(f"pattern {self.name!r} has no match()")

    def analyze(self, subgraph: list[Layer]) -> None:
        raise NotImplementedError(f"pattern {self.name!r} has no analyze()")


# `@rule`: a pattern written as the program that it matches.

Function = Callable[..., Any]
_AS_IT_IS = Refusal("its replacement is there already")


class Rule(PatternRewriter):
    """A pattern made by `@rule`. A call of it calls the decorated function."""

    refuses_from_afar = True  # the function may read any layer

    def __init__(self, pattern: Function, function: Function, *, name: str, keep_types: bool = True) -> None:
        roots, variables = build(pattern)
        self.roots: tuple[Root, ...] = roots
        super().__init__(name, kinds(self.roots[0]), keep_types=keep_types)
        self.function = function
        self.variables = variables
        # Further outputs of the pattern are not above the root, so its depth is no bound for them.
        self.reach: int | None = depth(self.roots[0]) if len(self.roots) == 1 else None
        operators = [term for term in parts(self.roots) if isinstance(term, OpTerm)]
        self.inner_kinds = frozenset(term.kind for term in operators)
        self.fed_by = feeders(self.roots[0])
        self._matcher = Matcher(self.roots)
        self._named = {term.name: term for term in operators if term.name is not None}
        self._parameters = list(inspect.signature(function).parameters)[1:]
        known = {*variables, *self._named}
        if unknown := [parameter for parameter in self._parameters if parameter not in known]:
            raise RewriteError(f"rule {name!r} asks for {unknown}; its pattern has {sorted(known)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def find(self, layer: Layer) -> Any:
        return next(self._matcher.at(layer.node), None)

    def perform(self, layer: Layer, found: Bindings) -> bool | Refusal:
        """Call the function for one match after another, until it does not refuse."""
        net = layer.network
        result = self.function(net, **self._bindings(found))
        if not isinstance(result, Refusal):
            return self._replace(net, found.roots, result)
        others = self._matcher.at(layer.node)
        next(others, None)
        # If it added layers before it refused, they have to be undone, and no other match is tried.
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
        for name in self._parameters:
            if name in self._named:
                node = match.nodes.get(self._named[name])
                bound[name] = None if node is None else Layer(node)
            else:
                value = match.variables.get(name)
                bound[name] = None if value is None else Tensor.of(value)
        return bound

    def _replace(self, net: Network, roots: list[ir.Value], result: Any) -> bool | Refusal:
        outputs = result if isinstance(result, tuple | list) else (result,)
        if len(outputs) != len(roots) or not all(isinstance(tensor, Tensor) for tensor in outputs):
            raise RewriteError(f"the rule returned {result!r} instead of {len(roots)} tensor(s)")
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

"""What a pattern is: `PatternRewriter` changes a network, `PatternAnalyzer` learns from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from intarsia.errors import RewriteError
from intarsia.network import Layer


@dataclass(frozen=True)
class Refusal:
    """A pattern's "no", with its reason; false wherever a truth value is asked for."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.reason


def refuse(reason: str) -> Refusal:
    """Say why a pattern does not apply here.

    >>> bool(refuse("bias has 2 dimensions"))
    False
    """
    return Refusal(reason)


class PatternRewriter:
    """A rewriting pattern written as a class.

    With `separate_match_rewrite`, `match(layer)` says whether, and `rewrite(layer)` acts; without it,
    `match_and_rewrite(layer)` does both and says whether it acted. `root_layer` holds the kinds of layer
    it may be asked about (`{"Add", "com.microsoft::BiasGelu"}`), or None for all. New layers are put
    before the layer asked about. `keep_types=False` is for the rare pattern that means to change the
    shape or dtype of what it replaces; what follows is then inferred anew.

    `reach` is how many layers deep it looks, the root included: where it said no, it is asked again once
    something changed within that many. None promises nothing, and is asked again after any change.
    """

    reach: int | None = None
    refuses_from_afar = False  # whether it may find a match and still say no for what lies beyond its reach
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
        """What `perform` needs to act on this layer; false if it cannot."""
        return self.match(layer) if self.separate_match_rewrite else True

    def perform(self, layer: Layer, found: Any) -> bool | Refusal:
        """Act; false if it turns out that it cannot."""
        if not self.separate_match_rewrite:
            return self.match_and_rewrite(layer)
        self.rewrite(layer)
        return True

    def why_not(self, layer: Layer) -> str:
        """Why `find` said no."""
        match = self.find(layer)
        return match.reason if isinstance(match, Refusal) else "match() said no"


class PatternAnalyzer:
    """An analysis pattern: `match(layer)` picks layers, `analyze(layers)` is then given all of them."""

    def __init__(self, name: str, root_layer: Iterable[str] | None = None) -> None:
        self.name = name
        self.root_layer: frozenset[str] | None = None if root_layer is None else frozenset(root_layer)
        self.args: Any = None

    def match(self, layer: Layer) -> bool | Refusal:
        raise NotImplementedError(f"pattern {self.name!r} has no match()")

    def analyze(self, subgraph: list[Layer]) -> None:
        raise NotImplementedError(f"pattern {self.name!r} has no analyze()")

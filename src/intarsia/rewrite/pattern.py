"""Patterns: `PatternRewriter` changes a network, `PatternAnalyzer` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from intarsia.errors import RewriteError
from intarsia.network import Layer


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
        return match.reason if isinstance(match, Refusal) else "match() said no"


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

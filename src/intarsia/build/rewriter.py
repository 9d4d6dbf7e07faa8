"""The patterns that a user chose, as the step between converting a piece and building it."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.build.trial import Rewrite
from intarsia.engines import Engine, NetworkEngine
from intarsia.network import Network
from intarsia.rewrite import Patterns, apply, patterns_by_engine


def rewriter(patterns: Patterns, engines: Sequence[Engine], device: str = "cpu") -> Rewrite:
    """Rewrites a network for an engine; names are looked up now, so that a typo is found before anything."""
    names = list(dict.fromkeys(engine.family for engine in engines if isinstance(engine, NetworkEngine)))
    chosen = patterns_by_engine(patterns, names)

    def rewrite(net: Network, engine: NetworkEngine) -> None:
        apply(net, engine=engine.family, patterns=chosen[engine.family], build=engine.build, device=device)

    return rewrite

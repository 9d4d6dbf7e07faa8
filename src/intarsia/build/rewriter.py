"""The patterns that a user chose, as the step between converting a piece and building it."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.build.trial import Rewrite
from intarsia.engines import Engine, NetworkEngine
from intarsia.network import Network
from intarsia.rewrite import Patterns, apply, patterns_by_engine


def rewriter(patterns: Patterns, engines: Sequence[Engine], device: str = "cpu") -> Rewrite:
    """Rewrites a network for an engine; names are looked up now, so that a typo is found before anything."""
    network_engines = [engine for engine in engines if isinstance(engine, NetworkEngine)]
    chosen = patterns_by_engine(patterns, network_engines)
    everything = patterns is True or patterns == "all"

    def rewrite(net: Network, engine: NetworkEngine) -> list[str]:
        log = apply(net, engine=engine, patterns=chosen[engine.name], device=device)
        notes = log.failures()
        if everything:  # the user asked for all of them
            for name, reason in log.skipped.items():
                notes.append(f"{engine.name}: pattern {name!r} is left out: {reason}")
            if not engine.patterns():
                notes.append(f"{engine.name}: it allows none of the shipped patterns")
        return notes

    return rewrite

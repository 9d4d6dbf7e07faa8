"""Which patterns a user chose: shipped ones by name, their own as objects or in managers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from intarsia.errors import RewriteError
from intarsia.rewrite.fusions import FUSIONS
from intarsia.rewrite.index import Entry
from intarsia.rewrite.manager import RewritePatternManager
from intarsia.rewrite.pattern import PatternRewriter

Pattern = str | PatternRewriter | RewritePatternManager
Patterns = bool | Pattern | Iterable[Pattern] | None


def patterns_by_engine(patterns: Patterns, engines: Sequence[str]) -> dict[str, Patterns]:
    """What each engine is to be given of the patterns chosen for all of them.

    A shipped pattern makes layers that some engines do not know; it is left out for those, and an error
    where none of the engines knows them.
    """
    if patterns is None or isinstance(patterns, bool) or patterns == "all":
        return dict.fromkeys(engines, patterns)
    chosen = as_list(patterns)
    entries(chosen)
    for name in chosen:
        if engines and not any(_knows(engine, name) for engine in engines):
            raise RewriteError(
                f"{', '.join(engines)} does not know the layers that pattern {name!r} makes, or gains nothing"
            )
    return {engine: [one for one in chosen if _knows(engine, one)] for engine in engines}


def as_list(patterns: Pattern | Iterable[Pattern]) -> list[Pattern]:
    """The patterns; RewriteError for what are none."""
    if isinstance(patterns, type) or not isinstance(patterns, Pattern | Iterable):
        raise RewriteError(f"rewrite={patterns!r}; give patterns, their names, True, False or None")
    return (
        [patterns] if isinstance(patterns, str | PatternRewriter | RewritePatternManager) else list(patterns)
    )


def _knows(engine: str, pattern: Pattern) -> bool:
    return not isinstance(pattern, str) or pattern not in FUSIONS or engine in FUSIONS[pattern].engines


def entries(chosen: Sequence[Pattern]) -> list[Entry]:
    """The patterns under their labels. A name is a shipped pattern's or a label of the shared manager's."""
    found: dict[str, Entry] = {}
    for one in chosen:
        for entry in _entries_of(one):
            if entry.label in found:
                raise RewriteError(f"two patterns are chosen under the label {entry.label!r}")
            found[entry.label] = entry
    return list(found.values())


def _entries_of(one: Pattern) -> list[Entry]:
    if isinstance(one, RewritePatternManager):
        return one.entries()
    if isinstance(one, PatternRewriter):
        return [Entry(one.name, one, 0)]
    if not isinstance(one, str):
        raise RewriteError(f"rewrite= takes names, patterns and managers, not {one!r}")
    if one in FUSIONS:
        return [Entry(one, FUSIONS[one].pattern, FUSIONS[one].benefit)]
    own = {entry.label: entry for entry in RewritePatternManager.instance().entries()}
    if one in own:
        return [own[one]]
    known = [*FUSIONS, *own]
    near = difflib.get_close_matches(one, known, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(sorted(known))}"
    )
    raise RewriteError(f"no pattern is called {one!r}; {hint}")

"""What fired where: the log of one rewriting run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fired:
    """One rewrite: the pattern, the layers it took away and those it put in their place."""

    pattern: str
    layer: str
    kind: str
    replaced: tuple[str, ...]
    made: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.pattern}: {', '.join(self.replaced)} -> {', '.join(self.made) or 'nothing'}{where}"


@dataclass
class RewriteLog:
    """Every rewrite of a run in order, and what was taken back.

    `exhausted` says that the run ended because `limit` rewrites were made.
    """

    fired: list[Fired] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    exhausted: bool = False

    def __len__(self) -> int:
        return len(self.fired)

    def add(self, other: RewriteLog) -> None:
        """Take in what a further run did."""
        self.fired += other.fired
        self.broken += other.broken
        self.skipped |= other.skipped
        self.exhausted |= other.exhausted

    def counts(self) -> dict[str, int]:
        """How often each pattern fired."""
        return dict(Counter(entry.pattern for entry in self.fired))

    def __str__(self) -> str:
        lines = [str(entry) for entry in self.fired]
        lines += [f"taken back: {reason}" for reason in self.broken]
        lines += [f"not used: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)

"""What fired where: the log of one rewriting run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir


@dataclass(frozen=True)
class Fired:
    """One rewrite: the pattern, the layer it was found at, the layers it removed and those it added."""

    pattern: str
    root: ir.Node
    replaced: tuple[str, ...]
    nodes: tuple[ir.Node, ...]

    @property
    def layer(self) -> str:
        """The layer it was found at."""
        return str(self.root.name)

    @property
    def kind(self) -> str:
        return self.root.op_type

    @property
    def made(self) -> tuple[str, ...]:
        return tuple(str(node.name) for node in self.nodes)

    @property
    def source(self) -> str:
        """The line of the model that the replaced layers come from; empty if it is unknown."""
        sources = (node.metadata_props.get("source", "") for node in (self.root, *self.nodes))
        return next(filter(None, sources), "")

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        replaced, added = (", ".join(names) or "nothing" for names in (self.replaced, self.made))
        return f"{self.pattern}: {replaced} -> {added}{where}"


@dataclass(frozen=True)
class Broken:
    """A rewrite that failed, because its pattern raised an exception or broke the network."""

    pattern: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass
class RewriteLog:
    """Every rewrite of a run in order, and those that failed.

    `exhausted` says that the run ended because `limit` rewrites were made.
    """

    fired: list[Fired] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    exhausted: bool = False

    def __len__(self) -> int:
        return len(self.fired)

    def write(self, pattern: str, root: ir.Node, removed: Sequence[ir.Node], made: Sequence[ir.Node]) -> None:
        """Record a rewrite and, on every new layer, its pattern and its origin."""
        replaced = tuple(str(node.name) for node in removed)
        self.fired.append(Fired(pattern, root, replaced, tuple(made)))
        if not made:
            return
        origins = [node.metadata_props for node in (root, *removed) if node.metadata_props]
        origin = next((each for each in origins if "source" in each), origins[0] if origins else {})
        for node in made:
            node.metadata_props.update({**origin, "pattern": pattern, "replaced": ", ".join(replaced)})

    def add(self, other: RewriteLog) -> None:
        """Add the entries of another run."""
        self.fired += other.fired
        self.broken += other.broken
        self.skipped |= other.skipped
        self.exhausted |= other.exhausted

    def counts(self) -> dict[str, int]:
        """How often each pattern fired."""
        return dict(Counter(entry.pattern for entry in self.fired))

    def failures(self) -> list[str]:
        """One sentence for each pattern that failed: where it first did, why, and at how many more layers."""
        failures = list(dict.fromkeys(self.broken))  # patterns are applied several times over
        counts = Counter(failure.pattern for failure in failures)
        first = {failure.pattern: failure for failure in reversed(failures)}
        return [
            str(first[name]) + (f" (and at {count - 1} more layers)" if count > 1 else "")
            for name, count in counts.items()
        ]

    def __str__(self) -> str:
        lines = [str(entry) for entry in self.fired]
        lines += [f"undone: {reason}" for reason in self.broken]
        lines += [f"not used: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)

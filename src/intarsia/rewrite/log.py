"""What fired where: the log of one rewriting run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir


class Fired(NamedTuple):
    """One rewrite: the pattern, the layers it took away and those it put in their place."""

    pattern: str
    root: ir.Node
    replaced: tuple[str, ...]
    nodes: list[ir.Node]

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
        """The line of the model that the replaced layers come from, where it is known."""
        known = [node.metadata_props.get("source", "") for node in (self.root, *self.nodes)]
        return next(filter(None, known), "")

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        replaced, made = (", ".join(names) or "nothing" for names in (self.replaced, self.made))
        return f"{self.pattern}: {replaced} -> {made}{where}"


@dataclass
class RewriteLog:
    """Every rewrite of a run in order, and what was taken back.

    `exhausted` says that the run ended because `limit` rewrites were made.
    """

    events: list[tuple[str, ir.Node, list[str], list[ir.Node]]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    exhausted: bool = False

    @property
    def fired(self) -> list[Fired]:
        """The rewrites, in order."""
        return [Fired(label, root, tuple(replaced), made) for label, root, replaced, made in self.events]

    def __len__(self) -> int:
        return len(self.events)

    def write(
        self, pattern: str, root: ir.Node, replaced: list[str], made: list[ir.Node], known: Sequence[ir.Node]
    ) -> None:
        """Note a rewrite, and on every new layer where it comes from; `known` may know it."""
        self.events.append((pattern, root, replaced, made))
        props = {"pattern": pattern, "replaced": ", ".join(replaced)}
        if known:
            told = [node.metadata_props for node in known if node.metadata_props]
            origin = next((each for each in told if "source" in each), told[0] if told else {})
            props = {**origin, **props}
        for node in made:
            if node._metadata_props is None:
                node._metadata_props = props
            else:
                node.metadata_props.update(props)
            if node is not made[-1]:
                props = dict(props)

    def add(self, other: RewriteLog) -> None:
        """Take in what a further run did."""
        self.events += other.events
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

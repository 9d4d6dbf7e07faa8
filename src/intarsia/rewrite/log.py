"""What fired where: the log of one rewriting run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import onnx_ir as ir

from intarsia.network.raw import name_of, write_props


class Fired:
    """One rewrite: the pattern, the layers it took away and those it put in their place."""

    __slots__ = ("_gone", "_made", "_root", "pattern")

    def __init__(self, pattern: str, root: ir.Node, gone: list[ir.Node], made: list[ir.Node]) -> None:
        self.pattern = pattern
        self._root, self._gone, self._made = root, gone, made

    @property
    def layer(self) -> str:
        """The layer it was found at."""
        return str(self._root.name)

    @property
    def kind(self) -> str:
        return self._root.op_type

    @property
    def replaced(self) -> tuple[str, ...]:
        return tuple([str(node.name) for node in self._gone])

    @property
    def made(self) -> tuple[str, ...]:
        return tuple([str(node.name) for node in self._made])

    @property
    def source(self) -> str:
        """The line of the model that the replaced layers come from, where it is known."""
        return next(
            (node.metadata_props["source"] for node in self._from() if "source" in node.metadata_props), ""
        )

    def _from(self) -> list[ir.Node]:
        return [self._root, *self._gone]

    def stamp(self, traced: bool) -> None:
        """Write on every new layer where it comes from; `traced` says that old layers know it."""
        props = {"pattern": self.pattern, "replaced": ", ".join(map(name_of, self._gone))}
        if traced:
            origin = next((node.metadata_props for node in self._from() if node.metadata_props), {})
            props = {**origin, **props}
        for node in self._made:
            write_props(node, props)
            if node is not self._made[-1]:
                props = dict(props)

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

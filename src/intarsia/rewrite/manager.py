"""Managers of patterns: sets of patterns with labels that are applied to a network together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, net_guard
from intarsia.rewrite.driver import Driver
from intarsia.rewrite.index import Entry, PatternIndex, bits
from intarsia.rewrite.log import RewriteLog
from intarsia.rewrite.pattern import PatternAnalyzer, PatternRewriter, Refusal
from intarsia.rewrite.transaction import attempt


class Match(NamedTuple):
    """A place where a pattern would fire."""

    label: str
    layer: Layer


class MatchReport(NamedTuple):
    """The result of one pattern for one layer. `reason` is empty if it would fire."""

    label: str
    reason: str

    def __str__(self) -> str:
        return f"{self.label}: {self.reason or 'matches'}"


class RewritePatternManager:
    """Rewriting patterns, highest benefit first.

    >>> from intarsia.network import Network, Tensor, functional as F, net_guard
    >>> from intarsia.rewrite import RewritePatternManager, rule
    >>> import torch
    >>> @rule(lambda op, x: op.Relu(op.Relu(x)))
    ... def relu_once(net, x):
    ...     return F.relu(x)
    >>> net = Network()
    >>> with net_guard(net):
    ...     F.relu(F.relu(Tensor("x", torch.float32, (3,)))).mark_output("y")
    >>> manager = RewritePatternManager()
    >>> manager.add("relu_once", relu_once)
    >>> print(manager.rewrite(net))
    relu_once: relu_1, relu -> relu_2
    >>> print(net)
    network(x: f32[3]) -> (y: f32[3])
      y = Relu(x)
    """

    _instance: RewritePatternManager | None = None

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    @classmethod
    def instance(cls) -> RewritePatternManager:
        """The manager of `intarsia.compile`. Its patterns are applied to every network."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def add(self, label: str, pattern: PatternRewriter, benefit: float = 0) -> None:
        """Add a pattern with a label. Of the patterns that match, the highest benefit is applied."""
        if label in self._entries:
            raise RewriteError(f"a pattern is already held under the label {label!r}")
        if not isinstance(pattern, PatternRewriter):
            raise RewriteError(f"{pattern!r}, labelled {label!r}, is not a PatternRewriter")
        self._entries[label] = Entry(label, pattern, benefit)

    def get(self, label: str) -> PatternRewriter:
        if label not in self._entries:
            raise RewriteError(f"no pattern is held under {label!r}; there are {list(self._entries)}")
        return self._entries[label].pattern

    def entries(self) -> list[Entry]:
        """All patterns with labels and benefits, in the order they were added."""
        return list(self._entries.values())

    def remove(self, label: str) -> None:
        """Remove a pattern; an error if the label is unknown."""
        self.get(label)
        del self._entries[label]

    def labels(self) -> list[str]:
        """All labels, highest benefit first."""
        return [entry.label for entry in self._sorted()]

    def rewrite(
        self,
        net: Network,
        args: Any = None,
        *,
        limit: int | None = None,
        budget: int | None = None,
        strict: bool = True,
    ) -> RewriteLog:
        """Apply the patterns until none matches.

        `limit` stops after this number of rewrites, to find a wrong one by halving. With `strict=False`, a
        rewrite that breaks the network is undone and noted in the log, instead of an error.
        """
        self._pass(args)
        return Driver(net, self._sorted(), limit=limit, budget=budget, strict=strict).run()

    def matches(self, net: Network, args: Any = None) -> list[Match]:
        """The places where patterns would fire in the current network. Nothing is changed."""
        return list(self.each_match(net, args))

    def each_match(self, net: Network, args: Any = None) -> Iterator[Match]:
        """The matches one by one, for those who need the first only."""
        self._pass(args)
        net.order.complete()
        index = PatternIndex(self._sorted())
        for layer in list(net.get_layers()):
            for number in bits(index.starting_at(layer.node)):
                if layer.is_removed():
                    break  # by whoever asks for the matches
                entry = index.entries[number]
                with net_guard(net):
                    outcome = self._ask(net, entry, layer)
                if not outcome.reason:
                    yield Match(entry.label, layer)

    def explain(self, layer: Layer, args: Any = None) -> list[MatchReport]:
        """The result of each pattern for this layer: that it matches, or why the nearest match fails."""
        self._pass(args)
        layer.network.order.complete()
        with net_guard(layer.network):
            return [self._ask(layer.network, entry, layer) for entry in self._sorted()]

    def _ask(self, net: Network, entry: Entry, layer: Layer) -> MatchReport:
        pattern = entry.pattern
        if pattern.root_layer is not None and layer.kind not in pattern.root_layer:
            kinds = " or ".join(sorted(pattern.root_layer))
            return MatchReport(entry.label, f"it starts at {kinds}; {layer.name} is {layer.kind}")
        try:
            match = pattern.find(layer)
            if not match:
                return MatchReport(entry.label, pattern.why_not(layer))
        except Exception as error:
            return MatchReport(entry.label, f"it could not be asked about {layer.name}: {error}")
        try:
            outcome = attempt(net, pattern, layer.node, match, keep=False)
        except RewriteError as error:
            return MatchReport(entry.label, str(error))
        return MatchReport(entry.label, outcome.reason if isinstance(outcome, Refusal) else "")

    def _sorted(self) -> list[Entry]:
        return sorted(self._entries.values(), key=lambda entry: -entry.benefit)

    def _pass(self, args: Any) -> None:
        for entry in self._entries.values():
            entry.pattern.args = args


class AnalysisPatternManager:
    """Analysis patterns. Each receives all layers that it selected."""

    _instance: AnalysisPatternManager | None = None

    def __init__(self) -> None:
        self._patterns: dict[str, tuple[float, PatternAnalyzer]] = {}

    @classmethod
    def instance(cls) -> AnalysisPatternManager:
        """The manager of `intarsia.compile`. Its patterns see every network before it is rewritten."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def add(self, label: str, pattern: PatternAnalyzer, benefit: float = 0) -> None:
        if label in self._patterns:
            raise RewriteError(f"a pattern is already held under the label {label!r}")
        self._patterns[label] = (benefit, pattern)

    def get(self, label: str) -> PatternAnalyzer:
        if label not in self._patterns:
            raise RewriteError(f"no pattern is held under {label!r}; there are {list(self._patterns)}")
        return self._patterns[label][1]

    def remove(self, label: str) -> None:
        """Remove a pattern; an error if the label is unknown."""
        self.get(label)
        del self._patterns[label]

    def analyze(self, net: Network, args: Any = None) -> None:
        """Call `match` of every pattern on every layer, then `analyze` on the selected layers."""
        for _, pattern in sorted(self._patterns.values(), key=lambda held: -held[0]):
            pattern.args = args
            try:
                pattern.analyze([layer for layer in net.get_layers() if _picks(pattern, layer)])
            except Exception as error:
                raise RewriteError(f"analysis pattern {pattern.name!r} failed: {error!r}") from error


def _picks(pattern: PatternAnalyzer, layer: Layer) -> bool:
    return (pattern.root_layer is None or layer.kind in pattern.root_layer) and bool(pattern.match(layer))

"""Managers: sets of patterns with labels that are applied together; and submodules swapped before capture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Generic, NamedTuple, Self

from torch import nn

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, net_guard
from intarsia.rewrite.driver import Driver, Entry, Labelled, P, PatternIndex, bits
from intarsia.rewrite.pattern import PatternAnalyzer, PatternRewriter, Refusal
from intarsia.rewrite.transaction import RewriteLog, attempt


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


class _Manager(Generic[P]):
    """Patterns under labels."""

    _instance: ClassVar[Any] = None
    _kind: ClassVar[type]

    def __init__(self) -> None:
        self._entries: dict[str, Labelled[P]] = {}

    @classmethod
    def instance(cls) -> Self:
        """The manager of `intarsia.compile`. Its patterns see every network."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance  # type: ignore[no-any-return]

    def add(self, label: str, pattern: P, benefit: float = 0) -> None:
        """Add a pattern with a label. The highest benefit comes first."""
        if label in self._entries:
            raise RewriteError(f"there is a pattern with the label {label!r}")
        if not isinstance(pattern, self._kind):
            raise RewriteError(f"{pattern!r}, labelled {label!r}, is not a {self._kind.__name__}")
        self._entries[label] = Labelled(label, pattern, benefit)

    def get(self, label: str) -> P:
        if label not in self._entries:
            raise RewriteError(
                f"there is no pattern with the label {label!r}; there are {list(self._entries)}"
            )
        return self._entries[label].pattern

    def remove(self, label: str) -> None:
        """Remove a pattern; an error if the label is unknown."""
        self.get(label)
        del self._entries[label]

    def entries(self) -> list[Labelled[P]]:
        """All patterns with labels and benefits, in the order they were added."""
        return list(self._entries.values())

    def labels(self) -> list[str]:
        """All labels, highest benefit first."""
        return [entry.label for entry in self._sorted()]

    def _sorted(self) -> list[Labelled[P]]:
        return sorted(self._entries.values(), key=lambda entry: -entry.benefit)


class RewritePatternManager(_Manager[PatternRewriter]):
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

    _kind = PatternRewriter

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

    def each_match(self, net: Network, args: Any = None, *, once: bool = False) -> Iterator[Match]:
        """The matches one by one; with `once`, the first of every pattern."""
        self._pass(args)
        net.order.complete()
        index = PatternIndex(self._sorted())
        left = -1  # the patterns that are asked about
        for layer in list(net.get_layers()):
            for number in bits(index.starting_at(layer.node, left)):
                if layer.is_removed():
                    break  # by whoever asks for the matches
                entry = index.entries[number]
                with net_guard(net):
                    outcome = self._ask(net, entry, layer, explain=False)
                if not outcome.reason:
                    left &= ~(1 << number) if once else -1
                    yield Match(entry.label, layer)

    def explain(self, layer: Layer, args: Any = None) -> list[MatchReport]:
        """The result of each pattern for this layer: that it matches, or why the nearest match fails."""
        self._pass(args)
        layer.network.order.complete()
        with net_guard(layer.network):
            return [self._ask(layer.network, entry, layer) for entry in self._sorted()]

    def _ask(self, net: Network, entry: Entry, layer: Layer, *, explain: bool = True) -> MatchReport:
        pattern = entry.pattern
        if pattern.root_layer is not None and layer.kind not in pattern.root_layer:
            kinds = " or ".join(sorted(pattern.root_layer))
            return MatchReport(entry.label, f"it starts at {kinds}; {layer.name} is {layer.kind}")
        try:
            match = pattern.find(layer)
            if not match:
                return MatchReport(entry.label, pattern.why_not(layer) if explain else "it does not match")
        except Exception as error:
            return MatchReport(entry.label, f"it could not be checked at {layer.name}: {error}")
        try:
            outcome = attempt(net, pattern, layer.node, match, keep=False)
        except RewriteError as error:
            return MatchReport(entry.label, str(error))
        return MatchReport(entry.label, outcome.reason if isinstance(outcome, Refusal) else "")

    def _pass(self, args: Any) -> None:
        for entry in self._entries.values():
            entry.pattern.args = args


class AnalysisPatternManager(_Manager[PatternAnalyzer]):
    """Analysis patterns. Each receives all layers that it selected."""

    _kind = PatternAnalyzer

    def analyze(self, net: Network, args: Any = None) -> None:
        """Call `match` of every pattern on every layer, then `analyze` on the selected layers."""
        for pattern in (entry.pattern for entry in self._sorted()):
            pattern.args = args
            try:
                pattern.analyze([layer for layer in net.get_layers() if _picks(pattern, layer)])
            except Exception as error:
                raise RewriteError(f"analysis pattern {pattern.name!r} failed: {error!r}") from error


def _picks(pattern: PatternAnalyzer, layer: Layer) -> bool:
    return (pattern.root_layer is None or layer.kind in pattern.root_layer) and bool(pattern.match(layer))


# Module rewriting: submodules swapped by class or path, before the graph is made.

Key = type[nn.Module] | str
Swap = Callable[[nn.Module], nn.Module]


class Swapped(NamedTuple):
    """One submodule that was swapped."""

    path: str
    old: str
    new: str


class Rewritten(NamedTuple):
    """The model with its submodules swapped, and which they were."""

    model: nn.Module
    swapped: list[Swapped]


def rewrite_modules(model: nn.Module, rules: Mapping[Key, Swap]) -> Rewritten:
    """The model with submodules swapped: keys are exact classes, paths or globs; values make the new module.

    The model itself is not changed. The result shares its parameters and all modules that are not swapped. A
    module that is used in several places is swapped once. The first rule that matches a module applies, and
    modules inside a new one are not visited.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.ReLU()))
    >>> new, swapped = rewrite_modules(model, {nn.ReLU: lambda old: nn.SiLU()})
    >>> [type(m).__name__ for m in new], [s.path for s in swapped]
    (['Linear', 'SiLU', 'Sequential'], ['1', '2.0'])
    >>> new[0] is model[0]
    True
    """
    if not rules:
        raise RewriteError("no rule to swap modules was passed")
    swapped: list[Swapped] = []
    used: set[Key] = set()
    done: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> nn.Module:
        if id(module) in done:
            return done[id(module)]
        key = next((key for key in rules if _names(key, module, path)), None)
        if key is not None:
            used.add(key)
            new = rules[key](module)
            if not isinstance(new, nn.Module):
                raise RewriteError(f"the rule for {path or 'the model'} gave {new!r}, which is not a module")
            new.train(module.training)
            swapped.append(Swapped(path, type(module).__name__, type(new).__name__))
        else:
            new = _with_children(module, path, visit)
        done[id(module)] = new
        return new

    rewritten = visit(model, "")
    if unused := [key if isinstance(key, str) else key.__name__ for key in rules if key not in used]:
        raise RewriteError(f"no submodule is named by {unused}")
    return Rewritten(rewritten, swapped)


def _names(key: Key, module: nn.Module, path: str) -> bool:
    if isinstance(key, type):
        return type(module) is key
    return bool(path) and fnmatchcase(path, key)


def _with_children(module: nn.Module, path: str, visit: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
    """The module itself if none of its children changed, else a shallow copy that has the new ones."""
    children = {
        name: child if child is None else visit(child, f"{path}.{name}" if path else name)
        for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    twin = copy.copy(module)  # parameters and buffers are shared; the tables that hold them are not
    for table in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[table] = copy.copy(module.__dict__[table])
    twin._modules.update(children)
    return twin

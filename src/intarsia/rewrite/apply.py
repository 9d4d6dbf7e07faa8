"""Patterns applied to a network before an engine builds it, and their benefit on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from intarsia.cache.machine import machine_key
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.errors import RewriteError, near_names
from intarsia.network import Network
from intarsia.rewrite.check import Build, random_inputs
from intarsia.rewrite.driver import Entry
from intarsia.rewrite.fusions import FUSIONS, Fusion, NetworkBuilder
from intarsia.rewrite.manager import AnalysisPatternManager, RewritePatternManager
from intarsia.rewrite.pattern import PatternRewriter
from intarsia.rewrite.transaction import RewriteLog
from intarsia.timing import race

Pattern = str | PatternRewriter | RewritePatternManager
Patterns = bool | Pattern | Iterable[Pattern] | None


def apply(
    net: Network,
    *,
    engine: NetworkBuilder,
    patterns: Patterns = None,
    measure: bool = True,
    limit: int | None = None,
    strict: bool = False,
    cache: Path | None = None,
    device: str = "cpu",
) -> RewriteLog:
    """Rewrite a network for an engine, by shipped patterns and the user's own.

    `patterns`: None applies those that are free and those measured to pay here; True or "all", every one
    whose layers the engine takes; both with all that `RewritePatternManager.instance()` holds. False applies
    none; a list just what it holds: names, patterns, managers. With `measure`, a pattern that has a place in
    the network and was not measured yet is measured now, on `device`, and the ratio is remembered. The log
    says which patterns were left out and why. Unless `patterns` is False, the patterns of
    `AnalysisPatternManager.instance()` look at the network first.

    >>> import torch
    >>> from intarsia.engines import OnnxRuntime
    >>> from intarsia.network import Network, Tensor, functional as F, net_guard
    >>> net = Network()
    >>> with net_guard(net):
    ...     F.relu(F.identity(F.neg(Tensor("x", torch.float32, (3,))))).mark_output("y")
    >>> print(apply(net, engine=OnnxRuntime()))
    identity: identity -> nothing
    """
    if patterns is False:
        return RewriteLog()
    AnalysisPatternManager.instance().analyze(net)
    if patterns is None:
        return _apply_paying(net, engine, measure, limit, strict, Benefits(cache, device))
    if patterns is True or patterns == "all":
        return _apply_all(net, engine, limit, strict)
    chosen = as_list(patterns)
    entries = entries_of(chosen)
    for pattern in chosen:
        _check_suits(pattern, [engine])
    return _manager(entries).rewrite(net, limit=limit, strict=strict)


def _apply_all(net: Network, engine: NetworkBuilder, limit: int | None, strict: bool) -> RewriteLog:
    """Apply every shipped pattern whose layers the engine takes, and the user's."""
    suitable = [fusion for fusion in FUSIONS.values() if fusion.suits(engine)]
    refused = {f.name: reason for f in suitable if (reason := f.refusal(engine)) is not None}
    shipped = _shipped_entries(fusion for fusion in suitable if fusion.name not in refused)
    skipped = {
        name: f"{engine.name} refuses the layers that the rewrite makes: {refused[name]}"
        for name in _matching([FUSIONS[name] for name in refused], net)
    }
    manager = _manager([*shipped, *RewritePatternManager.instance().entries()])
    log = manager.rewrite(net, limit=limit, strict=strict)
    log.skipped |= skipped
    return log


def _apply_paying(
    net: Network, engine: NetworkBuilder, measure: bool, limit: int | None, strict: bool, benefits: Benefits
) -> RewriteLog:
    """Apply the patterns that are faster; a pattern is measured when it first matches in a network."""
    suitable = [fusion for fusion in FUSIONS.values() if fusion.suits(engine)]
    entries = _shipped_entries(fusion for fusion in suitable if fusion.free)
    entries += RewritePatternManager.instance().entries()
    undecided = [fusion for fusion in suitable if not fusion.free]
    log = RewriteLog()
    while True:
        left = None if limit is None else limit - len(log)
        log.add(_manager(entries).rewrite(net, limit=left, strict=strict))
        if log.exhausted:
            return log
        matching = _matching(undecided, net)
        if not matching:
            return log
        for fusion in [fusion for fusion in undecided if fusion.name in matching]:
            undecided.remove(fusion)
            reason = _reason_to_skip(fusion, engine, measure, benefits)
            if reason is None:
                entries += _shipped_entries([fusion])
            else:
                log.skipped[fusion.name] = reason


def _reason_to_skip(fusion: Fusion, engine: NetworkBuilder, measure: bool, benefits: Benefits) -> str | None:
    """Why a pattern is not applied to networks for an engine; None if it is faster."""
    if fusion.finite_only:
        return "it gives other answers for NaN and infinities; name it in rewrite= to apply it"
    try:
        ratio = benefits.measured(engine, fusion) if measure else benefits.get(engine, fusion.name)
    except Exception as error:  # an engine of another package may raise anything
        return f"{engine.family} cannot build the layers that it makes: {error}"
    if ratio is None:
        return f"it was not measured with {engine.family} on this machine"
    if ratio > PAYS:
        return f"it takes {ratio:.2f} of the time without it, with {engine.family}"
    return None


def is_traded(log: RewriteLog) -> bool:
    """Whether a pattern fired that may be slower in this network: one that is not `free`, or the user's."""
    return any(name not in FUSIONS or not FUSIONS[name].free for name in log.counts())


def patterns_by_engine(patterns: Patterns, engines: Sequence[NetworkBuilder]) -> dict[str, Patterns]:
    """The patterns for each engine, by name, out of those chosen for all engines.

    A shipped pattern makes layers that some engines do not know; it is left out for those, and an error
    where none of the engines knows them.
    """
    if patterns is None or isinstance(patterns, bool) or patterns == "all":
        return dict.fromkeys((engine.name for engine in engines), patterns)
    chosen = as_list(patterns)
    entries_of(chosen)
    for pattern in chosen:
        _check_suits(pattern, engines)
    return {engine.name: [one for one in chosen if _suits(one, engine)] for engine in engines}


def as_list(patterns: Pattern | Iterable[Pattern]) -> list[Pattern]:
    """The patterns; RewriteError for other objects."""
    if isinstance(patterns, type) or not isinstance(patterns, Pattern | Iterable):
        raise RewriteError(f"rewrite={patterns!r}; pass patterns, their names, True, False or None")
    return (
        [patterns] if isinstance(patterns, str | PatternRewriter | RewritePatternManager) else list(patterns)
    )


def entries_of(chosen: Sequence[Pattern]) -> list[Entry]:
    """The patterns under their labels. A name is a shipped pattern's or a label of the shared manager's."""
    entries: dict[str, Entry] = {}
    for pattern in chosen:
        for entry in _entries_of(pattern):
            if entry.label in entries:
                raise RewriteError(f"two patterns are chosen under the label {entry.label!r}")
            entries[entry.label] = entry
    return list(entries.values())


def _entries_of(pattern: Pattern) -> list[Entry]:
    if isinstance(pattern, RewritePatternManager):
        return pattern.entries()
    if isinstance(pattern, PatternRewriter):
        return [Entry(pattern.name, pattern, 0)]
    if not isinstance(pattern, str):
        raise RewriteError(f"rewrite= takes names, patterns and managers, not {pattern!r}")
    if pattern in FUSIONS:
        return _shipped_entries([FUSIONS[pattern]])
    registered = {entry.label: entry for entry in RewritePatternManager.instance().entries()}
    if pattern in registered:
        return [registered[pattern]]
    names = [*FUSIONS, *registered]
    hint = near_names(pattern, names) or f"; the patterns are {', '.join(sorted(names))}"
    raise RewriteError(f"there is no pattern {pattern!r}{hint}")


def _suits(pattern: Pattern, engine: NetworkBuilder) -> bool:
    """Whether a pattern is for an engine; the user's own patterns are for all."""
    if not isinstance(pattern, str) or pattern not in FUSIONS:
        return True
    return FUSIONS[pattern].suits(engine) and FUSIONS[pattern].refusal(engine) is None


def _check_suits(pattern: Pattern, engines: Sequence[NetworkBuilder]) -> None:
    if engines and not any(_suits(pattern, engine) for engine in engines):
        names = ", ".join(dict.fromkeys(engine.family for engine in engines))
        raise RewriteError(
            f"{names} does not know the layers that pattern {pattern!r} makes, or gains nothing"
        )


def _shipped_entries(fusions: Iterable[Fusion]) -> list[Entry]:
    return [Entry(fusion.name, fusion.pattern, fusion.benefit) for fusion in fusions]


def _manager(entries: Iterable[Entry]) -> RewritePatternManager:
    manager = RewritePatternManager()
    for entry in entries:
        manager.add(entry.label, entry.pattern, entry.benefit)
    return manager


def _matching(fusions: Iterable[Fusion], net: Network) -> list[str]:
    """The names of the fusions that match somewhere in a network."""
    return [match.label for match in _manager(_shipped_entries(fusions)).each_match(net, once=True)]


# What a shipped pattern is worth on this machine: measured once per engine, remembered on disk.

PAYS = 0.97  # time with over time without, below which a pattern is applied
_ROUNDS = 10_000  # more than fit into the time of a measurement


def cache_file() -> Path:
    """The file of measurements: `rewrite.json` in the cache directory."""
    return cache_directory() / "rewrite.json"


def engine_key(engine: NetworkBuilder, device: str = "cpu") -> str:
    """An engine on a machine: another version, processor, GPU or number of threads is measured again."""
    where = machine_key() if device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{engine.family}, {engine.version()}, {where}"


class Benefits:
    """Time with a pattern over time without, by engine and pattern, on one kind of device.

    >>> import tempfile, pathlib
    >>> from intarsia.engines import OnnxRuntime
    >>> benefits = Benefits(pathlib.Path(tempfile.mkdtemp()) / "rewrite.json")
    >>> benefits.remember(OnnxRuntime(), "attention", 0.8)
    >>> benefits.get(OnnxRuntime(), "attention")
    0.8
    """

    def __init__(self, path: Path | None = None, device: str = "cpu") -> None:
        self.store: JsonStore = JsonStore(cache_file() if path is None else path)
        self.device = device

    def get(self, engine: NetworkBuilder, name: str) -> float | None:
        """The measurement, or None."""
        of_engine = self.store.read().get(engine_key(engine, self.device))
        ratio = of_engine.get(name) if isinstance(of_engine, dict) else None
        return ratio if isinstance(ratio, float) and ratio > 0 else None

    def remember(self, engine: NetworkBuilder, name: str, ratio: float) -> None:
        """Store a measurement, together with those of other processes."""
        self.store.update({engine_key(engine, self.device): {name: round(float(ratio), 4)}})

    def measured(self, engine: NetworkBuilder, fusion: Fusion) -> float:
        """The stored measurement, or a new one."""
        ratio = self.get(engine, fusion.name)
        if ratio is None:
            ratio = measure(fusion, engine.build, device=self.device)
            self.remember(engine, fusion.name, ratio)
        return ratio


def measure(
    fusion: Fusion, build: Build, *, seconds: float = 0.3, seed: int = 0, device: str = "cpu"
) -> float:
    """Run a fusion's large network with and without it, in turns; the ratio of the best times."""
    without = fusion.sample(np.random.default_rng(seed), large=True)
    with_it = fusion.sample(np.random.default_rng(seed), large=True)
    manager = RewritePatternManager()
    manager.add(fusion.name, fusion.pattern)
    manager.rewrite(with_it)
    inputs = [value.to(device) for value in random_inputs(without, np.random.default_rng(seed))]
    programs = {"with": build(with_it), "without": build(without)}
    calls = {name: partial(program, *inputs) for name, program in programs.items()}
    times = race(calls, rounds=_ROUNDS, budget_s=seconds, warmup=1, least=5)
    return times["with"].best / times["without"].best

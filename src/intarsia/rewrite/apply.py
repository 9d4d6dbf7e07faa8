"""Patterns, shipped and the user's own, applied to a network that an engine is about to build."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from intarsia.errors import EngineError, RewriteError
from intarsia.network import Network
from intarsia.rewrite.benefit import PAYS, Benefits
from intarsia.rewrite.check import Build
from intarsia.rewrite.chosen import Patterns, as_list, entries
from intarsia.rewrite.fusions import FUSIONS, Fusion
from intarsia.rewrite.index import Entry
from intarsia.rewrite.log import RewriteLog
from intarsia.rewrite.manager import AnalysisPatternManager, RewritePatternManager


def apply(
    net: Network,
    *,
    engine: str,
    patterns: Patterns = None,
    build: Build | None = None,
    limit: int | None = None,
    strict: bool = False,
    cache: Path | None = None,
    device: str = "cpu",
) -> RewriteLog:
    """Rewrite a network for an engine, by shipped patterns and the user's own.

    `patterns`: None applies those that are free and those measured to pay here; True or "all", every one
    the engine knows the layers of; both with all that `RewritePatternManager.instance()` holds. False
    applies none; a list just what it holds: names, patterns, managers. What was not measured yet is
    measured by `build` (the engine's) on `device`, if the network has a place for it, and remembered. The
    log says which patterns were left out and why. Unless `patterns` is False, the patterns of
    `AnalysisPatternManager.instance()` look at the network first.

    >>> import torch
    >>> from intarsia.network import Network, Tensor, functional as F, net_guard
    >>> net = Network()
    >>> with net_guard(net):
    ...     F.relu(F.identity(F.neg(Tensor("x", torch.float32, (3,))))).mark_output("y")
    >>> print(apply(net, engine="onnxruntime"))
    identity: identity -> nothing
    """
    if patterns is False:
        return RewriteLog()
    AnalysisPatternManager.instance().analyze(net)
    if patterns is None:
        return _measured(net, engine, build, limit, strict, Benefits(cache, device))
    return _run(net, _named(engine, patterns), limit, strict)


def _named(engine: str, patterns: Patterns) -> list[Entry]:
    if patterns is True or patterns == "all":
        shipped = [fusion for fusion in FUSIONS.values() if engine in fusion.engines]
        return [*_entries(shipped), *RewritePatternManager.instance().entries()]
    chosen = as_list(patterns)  # type: ignore[arg-type]
    found = entries(chosen)
    for name in chosen:
        if isinstance(name, str) and name in FUSIONS and engine not in FUSIONS[name].engines:
            raise RewriteError(
                f"{engine} does not know the layers that pattern {name!r} makes, or gains nothing"
            )
    return found


def _entries(fusions: Iterable[Fusion]) -> list[Entry]:
    return [Entry(fusion.name, fusion.pattern, fusion.benefit) for fusion in fusions]


def _run(net: Network, chosen: Iterable[Entry], limit: int | None, strict: bool) -> RewriteLog:
    return _manager(chosen).rewrite(net, limit=limit, strict=strict)


def _manager(chosen: Iterable[Entry]) -> RewritePatternManager:
    manager = RewritePatternManager()
    for entry in chosen:
        manager.add(entry.label, entry.pattern, entry.benefit)
    return manager


def _measured(
    net: Network, engine: str, build: Build | None, limit: int | None, strict: bool, known: Benefits
) -> RewriteLog:
    """Apply what pays; a pattern is only measured once something in a network asks for it."""
    usable = [fusion for fusion in FUSIONS.values() if engine in fusion.engines]
    chosen = _entries(fusion for fusion in usable if fusion.free) + RewritePatternManager.instance().entries()
    undecided = [fusion for fusion in usable if not fusion.free]
    log = RewriteLog()
    while True:
        left = None if limit is None else limit - len(log)
        log.add(_run(net, chosen, left, strict))
        if log.exhausted:
            return log
        wanted = [f for f in undecided if next(_manager(_entries([f])).each_match(net), None) is not None]
        if not wanted:
            return log
        for fusion in wanted:
            undecided.remove(fusion)
            if fusion.finite_only:
                log.skipped[fusion.name] = "it answers otherwise for NaN and infinities; name it to have it"
                continue
            try:
                ratio = known.ratio(engine, fusion, build)
            except EngineError as error:
                log.skipped[fusion.name] = f"{engine} does not build what it makes: {error}"
                continue
            if ratio is None:
                log.skipped[fusion.name] = f"it was not measured with {engine} on this machine"
            elif ratio > PAYS:
                log.skipped[fusion.name] = f"it takes {ratio:.2f} of the time without it, with {engine}"
            else:
                chosen += _entries([fusion])

"""Measurements remembered on disk: whole searches by model, costs by block.

What is remembered is the search: the winner is built and verified again, and if it comes out differently
everything is measured anew. With a tolerance the key has a digest of weights and examples, since errors are
those of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from intarsia.cache.directory import cache_directory
from intarsia.cache.machine import machine_key, package_version
from intarsia.cache.store import JsonStore
from intarsia.choose.contents import digest
from intarsia.choose.findings import Findings
from intarsia.engines import Engine

_KEPT = 2000  # searches, and costs; the oldest go first


class Memory:
    """Two tables in the cache directory. A key is made of all that a measurement depends on.

    >>> import tempfile
    >>> memory = Memory(Path(tempfile.mkdtemp()))
    >>> memory.keep_cost("a block on an engine", 0.25)
    >>> memory.cost("a block on an engine"), memory.cost("another")
    (0.25, None)
    """

    def __init__(self, directory: Path | None = None) -> None:
        folder = cache_directory() if directory is None else directory
        self._searches = JsonStore(folder / "choices.json")
        self._costs = JsonStore(folder / "costs.json")

    def findings(self, key: str) -> Findings | None:
        """What an earlier search found; None if there was none, or none that can be read."""
        entry = self._searches.read().get(key)
        if not isinstance(entry, dict):
            return None
        try:
            return Findings.from_dict(entry)
        except (AttributeError, KeyError, TypeError, ValueError):  # written by another version, or damaged
            return None

    def keep_findings(self, key: str, found: Findings) -> None:
        """Remember a search."""
        self._searches.update({key: found.as_dict()}, keep=_KEPT)

    def cost(self, key: str) -> float | None:
        """Seconds that something took, if it was measured."""
        cost = self._costs.read().get(key)
        return float(cost) if isinstance(cost, int | float) and cost >= 0 else None

    def keep_cost(self, key: str, seconds: float) -> None:
        """Remember the seconds that something took."""
        self._costs.update({key: seconds}, keep=_KEPT)


def key_of(what: str, engines: Sequence[Engine], *more: str) -> str:
    """The key of a measurement: what was measured, on which engines and options, on which machine."""
    running = [f"{engine.key()} {engine.version()}" for engine in engines]
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return digest(what, machine_key(), package_version("torch"), *gpu, *running, *more)

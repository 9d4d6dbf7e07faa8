"""The detection of dead ranks, by heartbeats in the store of torch.distributed.

A broken connection does not tell which rank died: a rank that raises because of it breaks its own connections
too. So each rank increments a counter in the store twice a second. The first rank that loses a connection
watches the counters, and writes the ranks whose counters stopped into the store, for the other ranks.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|pair is not connected|NCCL", re.IGNORECASE
)
_PERIOD = 0.5
_SILENCE = 4.0  # after a broken connection, a rank without a beat for so many seconds is dead
_PATIENCE = 15.0  # seconds after which the search for a silent rank ends
_VERDICT = "lost"


def _default_store() -> Any:
    """The store of the process group, for which torch has no public name; None if there is none."""
    getter = getattr(distributed_c10d, "_get_default_store", None)
    return None if getter is None else getter()


class Heartbeat:
    """Counts for this rank, and finds ranks that stopped."""

    def __init__(self, ranks: Sequence[int], me: int) -> None:
        self.ranks: list[int] = list(ranks)
        self.me: int = me
        store = _default_store()
        self.store: PrefixStore | None = None if store is None else PrefixStore("intarsia pipeline", store)
        if self.store is not None and len(self.ranks) > 1:
            _beat(store, self.store, me)

    def broke(self, error: BaseException) -> bool:
        """Whether an error reports a broken connection."""
        return _LOST.search(str(error)) is not None

    def lost(self) -> str:
        """The text for the ranks that died; all other ranks if they are unknown."""
        others = " or ".join(f"rank {r}" for r in self.ranks if r != self.me)
        if self.store is None:
            return others
        try:
            verdict = self._verdict()
            self._wait_for_readers(verdict)
            return verdict or others
        except Exception:  # the process that holds the store died
            return "the launcher, which holds torch.distributed's store" if _has_launcher() else "rank 0"

    def _verdict(self) -> str | None:
        assert self.store is not None
        first = {r: self._count(r) for r in self.ranks if r != self.me}
        began = time.monotonic()
        while time.monotonic() - began < _PATIENCE:
            if self.store.check([_VERDICT]):
                return str(self.store.get(_VERDICT).decode())
            time.sleep(_PERIOD)
            silent = [r for r, count in first.items() if self._count(r) == count]
            if time.monotonic() - began > _SILENCE and silent:
                words = " and ".join(f"rank {r}" for r in silent)
                return str(self.store.compare_set(_VERDICT, "", words).decode())
        return None

    def _wait_for_readers(self, verdict: str | None) -> None:
        """On the rank that holds the store, wait until the other ranks have read the verdict.

        Without torchrun, the store ends with rank 0. A rank whose connection breaks later would not find the
        store, and report that rank 0 died.
        """
        assert self.store is not None
        read = self.store.add("read", 1)
        if verdict is None or self.me != 0 or _has_launcher():
            return
        living = len(self.ranks) - len(verdict.split(" and "))
        began = time.monotonic()
        while read < living and time.monotonic() - began < _PATIENCE:
            time.sleep(_PERIOD / 5)
            read = self.store.add("read", 0)

    def _count(self, rank: int) -> int:
        assert self.store is not None
        return int(self.store.add(str(rank), 0))


def _has_launcher() -> bool:
    """Whether torchrun holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_beating: list[Any] = []  # the store in which this process counts


def _beat(store: Any, counts: PrefixStore, rank: int) -> None:
    """Start the counter, on one thread until the process group ends."""
    if any(other is store for other in _beating):
        return
    _beating[:] = [store]

    def run() -> None:
        try:
            while _default_store() is store:
                counts.add(str(rank), 1)
                time.sleep(_PERIOD)
        except Exception:  # the process group ended, or the process that holds the store died
            return

    threading.Thread(target=run, name="intarsia heartbeat", daemon=True).start()

"""Which rank died: every rank's heartbeat, in the store that torch.distributed began with.

A broken connection shows the failure of one neighbour, and a rank that raises for it breaks connections of
its own. So each rank counts in the store twice a second. The first that loses a connection waits to see whose
count stands still, and writes the verdict there, for the others to find.
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
_SILENCE = 4.0  # seconds without a beat that make a rank dead, once a connection broke
_PATIENCE = 15.0  # seconds after which the search for a silent rank ends
_VERDICT = "lost"


def _default_store() -> Any:
    """The store of the process group; torch has no public name for it. None where there is none."""
    getter = getattr(distributed_c10d, "_get_default_store", None)
    return None if getter is None else getter()


class Heartbeat:
    """Counts for this rank, and finds the rank that does not."""

    def __init__(self, ranks: Sequence[int], me: int) -> None:
        self.ranks: list[int] = list(ranks)
        self.me: int = me
        store = _default_store()
        self.store: PrefixStore | None = None if store is None else PrefixStore("intarsia pipeline", store)
        if self.store is not None and len(self.ranks) > 1:
            _beat(store, self.store, me)

    def broke(self, error: BaseException) -> bool:
        """Whether an error says that a connection is gone."""
        return _LOST.search(str(error)) is not None

    def lost(self) -> str:
        """The rank that died, as text; all other ranks if it is unknown."""
        others = " or ".join(f"rank {r}" for r in self.ranks if r != self.me)
        if self.store is None:
            return others
        try:
            verdict = self._verdict()
            self._wait_for_readers(verdict)
            return verdict or others
        except Exception:  # the store is gone, and with it the process that holds it
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
        """Keep the store until the others have read the verdict, on the rank whose process holds it.

        Without torchrun the store ends with rank 0. A rank whose own connection breaks later would find it
        gone, and say that rank 0 died.
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


_beating: list[Any] = []  # the store of the process group that this process counts in


def _beat(store: Any, counts: PrefixStore, rank: int) -> None:
    """Begin to count, on one thread for the life of the process group."""
    if any(known is store for known in _beating):
        return
    _beating[:] = [store]

    def run() -> None:
        try:
            while _default_store() is store:
                counts.add(str(rank), 1)
                time.sleep(_PERIOD)
        except Exception:  # the process group has ended, or the process that holds the store died
            return

    threading.Thread(target=run, name="intarsia heartbeat", daemon=True).start()

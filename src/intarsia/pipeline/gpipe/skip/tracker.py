"""The storage of stashed skip tensors until they are popped."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.stream import AbstractStream


class Namespace:
    """A unique name; copies of it are equal.

    >>> import copy
    >>> ns = Namespace()
    >>> copy.deepcopy(ns) == ns, Namespace() == ns
    (True, False)
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id: uuid.UUID = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace {self.id}>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    # Namespaces are sorted together with None; any order is fine.
    def __lt__(self, other: Namespace | None) -> bool:
        return other is not None and self.id < other.id


class SkipTracker:
    """Stores the skips of one thread outside a pipeline."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Namespace | None, str], Any] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Any) -> None:
        """Stash a skip of a micro-batch."""
        self.tensors[(ns, name)] = tensor

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Any:
        """Pop a skip. Raises KeyError if it was not stashed."""
        return self.tensors.pop((ns, name))

    def copy(
        self, batch: Batch, source: AbstractStream, target: AbstractStream, ns: Namespace | None, name: str
    ) -> None:
        """Copy a skip to another device."""
        raise TypeError("skips can be copied only between the stages of a pipeline")


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker: SkipTracker | None = None


_current = _Current()


@contextmanager
def use_skip_tracker(skip_tracker: SkipTracker) -> Iterator[None]:
    """Make skippable modules on this thread use a tracker."""
    before, _current.tracker = _current.tracker, skip_tracker
    try:
        yield
    finally:
        _current.tracker = before


def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread."""
    if _current.tracker is None:
        _current.tracker = SkipTracker()
    return _current.tracker

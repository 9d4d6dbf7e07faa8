"""Where stashed skip tensors wait until they are popped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from intarsia.pipeline.gpipe.checkpoint import is_checkpointing
from intarsia.pipeline.gpipe.dependency import fork, join
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip.namespace import Namespace
from intarsia.pipeline.gpipe.skip.portal import Portal
from intarsia.pipeline.gpipe.stream import AbstractStream

if TYPE_CHECKING:
    from intarsia.pipeline.gpipe.skip.layout import SkipLayout


class SkipTracker:
    """Keeps skips of one thread, outside a pipeline: stashed here, popped here."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Namespace | None, str], Any] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Any) -> None:
        """Stash a skip of this micro-batch."""
        self.tensors[(ns, name)] = tensor

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Any:
        """Pop a skip; KeyError where nothing was stashed."""
        return self.tensors.pop((ns, name))

    def copy(
        self, batch: Batch, source: AbstractStream, target: AbstractStream, ns: Namespace | None, name: str
    ) -> None:
        """Take a skip to another device."""
        raise TypeError("skips are copied between stages, and there are none outside a pipeline")


class SkipTrackerThroughPortals(SkipTracker):
    """Keeps the skips of one micro-batch in a pipeline; those that leave their stage go through portals."""

    def __init__(self, skip_layout: SkipLayout) -> None:
        super().__init__()
        self.skip_layout = skip_layout
        self.portals: dict[tuple[Namespace | None, str], Portal] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Any) -> None:
        if not self.skip_layout.requires_copy(ns, name):
            super().save(batch, ns, name, tensor)
            return
        if (ns, name) not in self.portals:
            # blue, orange and, when the destination is computed again, orange once more
            self.portals[(ns, name)] = portal = Portal(tensor, 3 if is_checkpointing() else 2)
        else:
            # The source is computed again: blue alone uses the tensor, to send the gradient through it.
            portal = self.portals[(ns, name)]
            portal.put_tensor(tensor, 1)
        phony = portal.blue()
        if phony.requires_grad:
            position = _carrier(batch, name)
            batch[position] = join(batch[position], phony)

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Any:
        if not self.skip_layout.requires_copy(ns, name):
            return super().load(batch, ns, name)
        portal = self.portals[(ns, name)]
        position = _carrier(batch, name)
        batch[position], phony = fork(batch[position])
        return portal.orange(phony)

    def copy(
        self, batch: Batch, source: AbstractStream, target: AbstractStream, ns: Namespace | None, name: str
    ) -> None:
        portal = self.portals[(ns, name)]
        position = _carrier(batch, name)
        batch[position], phony = fork(batch[position])
        phony = portal.copy(source, target, phony)
        batch[position] = join(batch[position], phony)


# The name torchgpipe gave it.
SkipTrackerThroughPotals = SkipTrackerThroughPortals


def _carrier(batch: Batch, name: str) -> int:
    position = batch.carrier
    if position is None:
        raise TypeError(
            f"skip {name!r} cannot pass: the values beside it hold no floating-point tensor "
            "that could order its gradient"
        )
    return position


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker: SkipTracker | None = None


_current = _Current()


@contextmanager
def use_skip_tracker(skip_tracker: SkipTracker) -> Iterator[None]:
    """Let skippable modules on this thread use a tracker."""
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

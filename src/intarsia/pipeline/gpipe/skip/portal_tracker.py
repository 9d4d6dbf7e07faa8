"""Where the skips of one micro-batch wait in a pipeline; those that leave their stage go through portals."""

from __future__ import annotations

from typing import Any

from intarsia.pipeline.gpipe.checkpoint import is_checkpointing
from intarsia.pipeline.gpipe.dependency import fork, join
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.skip.layout import SkipLayout
from intarsia.pipeline.gpipe.skip.namespace import Namespace
from intarsia.pipeline.gpipe.skip.portal import Portal
from intarsia.pipeline.gpipe.skip.tracker import SkipTracker
from intarsia.pipeline.gpipe.stream import AbstractStream


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

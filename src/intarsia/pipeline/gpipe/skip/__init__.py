"""Skip connections between layers of a pipeline, over any number of stages."""

from intarsia.pipeline.gpipe.skip.skippable import pop, skippable, stash, verify_skippables
from intarsia.pipeline.gpipe.skip.tracker import Namespace

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]

"""Skip connections between layers of a pipeline, over any number of stages."""

from intarsia.pipeline.gpipe.skip.namespace import Namespace
from intarsia.pipeline.gpipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]

"""Pipelines: a model cut into balanced stages that work on different micro-batches at the same time."""

from intarsia.pipeline.balance import balance_by_size, balance_by_time, balance_cost, balance_stages
from intarsia.pipeline.checkpoint import is_checkpointing, is_recomputing
from intarsia.pipeline.gpipe import BalanceError, GPipe
from intarsia.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = [
    "BalanceError",
    "GPipe",
    "Namespace",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "balance_stages",
    "is_checkpointing",
    "is_recomputing",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]

"""Pipelines: a model cut into balanced stages that work on different micro-batches at the same time."""

from intarsia.pipeline.balance import balance_by_size, balance_by_time, balance_cost, balance_stages
from intarsia.pipeline.gpipe.checkpoint import is_checkpointing, is_recomputing
from intarsia.pipeline.gpipe.gpipe import BalanceError, GPipe
from intarsia.pipeline.gpipe.keyed_random import keyed_random
from intarsia.pipeline.gpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from intarsia.pipeline.model import Stages
from intarsia.pipeline.plan.cluster import Cluster
from intarsia.pipeline.plan.simulate import Simulation, ascii_gantt, save_gantt, simulate
from intarsia.pipeline.planner import PipelinePlan, measure, plan_pipeline
from intarsia.pipeline.schedules import SCHEDULES, Action, Schedule, Slot, define_schedule, schedule
from intarsia.pipeline.split import split
from intarsia.pipeline.stages.profile import DeviceSpeed
from intarsia.pipeline.stages.samples import mixed_samples

__all__ = [
    "SCHEDULES",
    "Action",
    "BalanceError",
    "Cluster",
    "DeviceSpeed",
    "GPipe",
    "Namespace",
    "PipelinePlan",
    "Schedule",
    "Simulation",
    "Slot",
    "Stages",
    "ascii_gantt",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "balance_stages",
    "define_schedule",
    "is_checkpointing",
    "is_recomputing",
    "keyed_random",
    "measure",
    "mixed_samples",
    "plan_pipeline",
    "pop",
    "save_gantt",
    "schedule",
    "simulate",
    "skippable",
    "split",
    "stash",
    "verify_skippables",
]

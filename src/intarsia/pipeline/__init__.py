"""Pipelines: a model cut into balanced stages that work on different micro-batches at the same time."""

from intarsia.pipeline.balance import balance_by_size, balance_by_time, balance_cost, balance_stages
from intarsia.pipeline.cluster.cluster import Cluster
from intarsia.pipeline.cluster_planner import ClusterPlan
from intarsia.pipeline.gpipe.checkpoint import is_checkpointing, is_recomputing
from intarsia.pipeline.gpipe.gpipe import BalanceError, GPipe
from intarsia.pipeline.gpipe.keyed_random import keyed_random
from intarsia.pipeline.gpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from intarsia.pipeline.model import Stages
from intarsia.pipeline.planner import PipelinePlan, plan_pipeline
from intarsia.pipeline.schedule.draw import ascii_gantt, html_gantt, svg_gantt
from intarsia.pipeline.schedule.schedules import SCHEDULES, Schedule, schedule
from intarsia.pipeline.schedule.simulate import Simulation, simulate
from intarsia.pipeline.split import split
from intarsia.pipeline.stages.samples import mixed_samples

__all__ = [
    "SCHEDULES",
    "BalanceError",
    "Cluster",
    "ClusterPlan",
    "GPipe",
    "Namespace",
    "PipelinePlan",
    "Schedule",
    "Simulation",
    "Stages",
    "ascii_gantt",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "balance_stages",
    "html_gantt",
    "is_checkpointing",
    "is_recomputing",
    "keyed_random",
    "mixed_samples",
    "plan_pipeline",
    "pop",
    "schedule",
    "simulate",
    "skippable",
    "split",
    "stash",
    "svg_gantt",
    "verify_skippables",
]

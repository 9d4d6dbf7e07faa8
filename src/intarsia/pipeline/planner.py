"""Choosing cuts, micro-batches, schedule and checkpointing for a number of devices, by simulation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError
from intarsia.pipeline.cluster.cluster import Cluster
from intarsia.pipeline.cluster_planner import ClusterPlan, plan_on_cluster
from intarsia.pipeline.cost import Cost, total
from intarsia.pipeline.model import Stages
from intarsia.pipeline.schedule.schedules import SCHEDULES, refusal, schedule
from intarsia.pipeline.schedule.simulate import Simulation, simulate
from intarsia.pipeline.split import WEIGHT_COPIES, crossing_prices, make_stages
from intarsia.pipeline.stages.cost import profile
from intarsia.pipeline.stages.cut import choose_cuts
from intarsia.pipeline.stages.samples import judged
from intarsia.pipeline.stages.signature import tensor_spec
from intarsia.pipeline.stages.trace import Trace, trace

if TYPE_CHECKING:
    from intarsia.pipeline.distributed.pipeline import DistributedPipeline


@dataclass(frozen=True)
class Candidate:
    """One way to run the pipeline, with what it is predicted to cost."""

    schedule: str
    microbatches: int
    per_rank: int
    checkpoint: bool
    cuts: tuple[int, ...]
    prediction: Simulation

    @property
    def memory(self) -> int:
        """The bytes of the fullest device."""
        return max(self.prediction.peak_memory_by_rank)

    def __str__(self) -> str:
        kept = "recomputing" if self.checkpoint else "keeping"
        return (
            f"{self.schedule:<16} {self.microbatches:>3} micro-batches {kept:<11}"
            f" {self.prediction.step_time * 1e3:9.2f} ms  bubble {self.prediction.bubble:4.0%}"
            f"  {self.memory / 2**20:8.1f} MB"
        )


@dataclass(frozen=True)
class PipelinePlan:
    """The chosen way, the others it was chosen from, and the stages cut for it."""

    choice: Candidate
    candidates: tuple[Candidate, ...]  # all that were tried, fastest first
    refused: int  # how many of them do not fit the memory
    stages: Stages
    measured: float | None = None  # seconds of a real step, where one was run

    def distributed(self, **options: Any) -> DistributedPipeline:
        """This rank's part of the plan; `options` are those of `Stages.distributed` (`loss_fn`, ...)."""
        choice = self.choice
        return self.stages.distributed(
            choice.schedule, choice.microbatches, checkpoint=choice.checkpoint, **options
        )

    def gpipe(self, **options: Any) -> nn.Module:
        """The plan in one process, a worker a stage; only GPipe's schedule runs there."""
        if self.choice.schedule != "GPipe":
            raise PartitionError(f"schedule={self.choice.schedule!r} needs several processes; GPipe does not")
        checkpoint = "always" if self.choice.checkpoint else "never"
        return self.stages.gpipe(chunks=self.choice.microbatches, checkpoint=checkpoint, **options)

    def __str__(self) -> str:
        lines = [f"chosen   {self.choice}"]
        if self.measured is not None:
            ratio = self.measured / self.choice.prediction.step_time
            lines.append(f"measured {self.measured * 1e3:.2f} ms a step, {ratio:.2f} times the prediction")
        lines += [f"         {c}" for c in self.candidates if c is not self.choice][:8]
        if self.refused:
            lines.append(f"         {self.refused} more do not fit the memory")
        return "\n".join(lines)


@overload
def plan_pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: int,
    memory: int | None = None,
    schedules: Sequence[str] = ...,
    microbatches: Sequence[int] | None = None,
    bandwidth: float = ...,
    latency: float = ...,
    slack: float = ...,
) -> PipelinePlan: ...


@overload
def plan_pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str | Path,
    batch: int | None = None,
    replicas: Sequence[int] | None = None,
    schedules: Sequence[str] = ...,
    microbatches: Sequence[int] | None = None,
    agree: bool = False,
) -> ClusterPlan: ...


def plan_pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: int | None = None,
    cluster: Cluster | str | Path | None = None,
    batch: int | None = None,
    replicas: Sequence[int] | None = None,
    agree: bool = False,
    memory: int | None = None,
    schedules: Sequence[str] = tuple(SCHEDULES),
    microbatches: Sequence[int] | None = None,
    bandwidth: float = 10e9,
    latency: float = 20e-6,
    slack: float = 0.02,
) -> PipelinePlan | ClusterPlan:
    """The fastest predicted way to train `model` on batches like `args` over `devices` devices.

    Costs are measured here at each micro-batch size; `memory` is the bytes of a device (weights, gradients,
    two optimizer moments, and what waits for backward); `bandwidth` (bytes a second) and `latency` (seconds)
    are the links'.

    With `cluster`, a description or its JSON file, in place of `devices`, the number of stages and replicas
    is found too, for steps of `batch` samples (as many as the example has) in all: a `ClusterPlan`. Under
    torchrun `agree` lets rank 0 measure and plan for all.

    >>> model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    >>> plan = plan_pipeline(model, (torch.randn(8, 16),), devices=2, schedules=["1F1B"], microbatches=[2])
    >>> plan.choice.schedule, len(plan.stages)
    ('1F1B', 2)
    """
    unknown = [name for name in schedules if name not in SCHEDULES]
    if unknown:
        raise PartitionError(f"schedule={unknown[0]!r} is none of {', '.join(SCHEDULES)}")
    if cluster is not None:
        if devices is not None or memory is not None:
            raise PartitionError(
                "the cluster says how many devices there are and their memory; give one of them"
            )
        described = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
        return plan_on_cluster(
            model,
            args,
            kwargs,
            described,
            batch=batch,
            schedules=schedules,
            microbatches=microbatches,
            replicas=replicas,
            agree=agree,
        )
    if devices is None:
        raise PartitionError("a plan needs devices=, their number, or cluster=, their description")
    if batch is not None or replicas is not None or agree:
        raise PartitionError("batch=, replicas= and agree= go with cluster=")
    captured = judged(model, trace(model, args, kwargs), args, kwargs)
    tensors = captured.signature.flatten(args, kwargs)
    tried: list[Candidate] = []
    for count, costs, lengths in _profiles(captured, tensors, microbatches, devices):
        for name in schedules:
            tried += _candidates(captured, costs, lengths, name, count, devices, (bandwidth, latency), slack)
    if not tried:
        raise PartitionError(
            f"no schedule of {list(schedules)} runs {list(microbatches or [])} micro-batches here"
        )
    fitting = [c for c in tried if memory is None or c.memory <= memory]
    if not fitting:
        least = min(tried, key=lambda c: c.memory)
        raise PartitionError(
            f"memory={memory} is too little: the leanest way takes {least.memory} bytes ({least})"
        )
    fitting.sort(key=lambda c: (c.prediction.step_time, c.memory))
    choice = fitting[0]
    costs = next(p[1] for p in _profiles(captured, tensors, [choice.microbatches], devices))
    stages = make_stages(model, captured, list(choice.cuts), costs, "time")
    return PipelinePlan(choice, tuple(fitting), len(tried) - len(fitting), stages)


def measure(
    plan: PipelinePlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, repeats: int = 3
) -> PipelinePlan:
    """The plan with a real step beside its prediction: a worker a stage, the least of `repeats`.

    The workers of one process run all forward passes and then all backward passes, so only a GPipe plan can
    be measured so; others are measured under torchrun.
    """
    if plan.choice.schedule != "GPipe":
        raise PartitionError(
            f"schedule={plan.choice.schedule!r} cannot be measured in one process; GPipe can"
        )
    pipe = plan.gpipe(concurrent_backward=True)
    seconds = []
    for _ in range(repeats + 1):
        pipe.zero_grad()
        begin = time.perf_counter()
        answer = pytree.tree_leaves(pipe(*args, **(kwargs or {})))
        roots = [a for a in answer if isinstance(a, torch.Tensor) and a.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(r) for r in roots])
        seconds.append(time.perf_counter() - begin)
    return replace(plan, measured=min(seconds[1:]))


def _profiles(
    captured: Trace, tensors: Sequence[torch.Tensor], counts: Sequence[int] | None, devices: int
) -> Iterator[tuple[int, list[Cost], Mapping[str, int]]]:
    """The node costs of one micro-batch, for each number of micro-batches that divides the batch."""
    signature = captured.signature
    batch = next(
        (t.shape[0] for s, t in zip(signature.tensors, tensors, strict=True) if signature.splits(s)), 1
    )
    least = (
        signature.ranges.get(str(signature.batch), (1, 0))[0] if isinstance(signature.batch, str) else batch
    )
    usual = [m for m in (1, 2, 4, 8, 16, 32) if m <= 4 * devices]
    for m in counts if counts is not None else usual:
        if batch % m or batch // m < least:
            if counts is not None:
                raise PartitionError(
                    f"microbatches={m} does not divide a batch of {batch} into parts of {least} or more"
                )
            continue
        part = [
            t[: batch // m] if signature.splits(s) else t
            for s, t in zip(signature.tensors, tensors, strict=True)
        ]
        costs = profile(captured, part)
        # What is kept was read from the graph at the example's batch; it grows with the micro-batch.
        yield m, [replace(c, saved=c.saved // m) for c in costs], signature.lengths(part)


def _candidates(
    captured: Trace,
    costs: Sequence[Cost],
    lengths: Mapping[str, int],
    name: str,
    microbatches: int,
    devices: int,
    link: tuple[float, float],
    slack: float,
) -> Iterator[Candidate]:
    per_rank = 2 if name == "Interleaved1F1B" else 1
    if refusal(name, devices, microbatches) is not None:
        return  # torch's runtime would not run it
    if name == "Interleaved1F1B" and (microbatches % devices or devices == 1):
        return
    stages = devices * per_rank
    if len(captured.line.allowed) < stages - 1:
        return
    prices = crossing_prices(captured)
    order = schedule(name, devices, microbatches, per_rank)
    seen = set()
    for weights in ([c.seconds for c in costs], [float(c.saved + c.weights * WEIGHT_COPIES) for c in costs]):
        cuts = choose_cuts(weights, prices, captured.line.allowed, stages, slack=slack)
        if tuple(cuts) in seen:
            continue
        seen.add(tuple(cuts))
        bounds = [0, *cuts, len(captured.line.nodes)]
        sums = [total(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] = sums[0].first()
        borders = [_border_bytes(captured, cut, lengths) for cut in cuts]
        links = [b / link[0] + link[1] for b in borders]
        for checkpoint in (False, True):
            simulation = simulate(
                order, sums, links=links, borders=borders, checkpoint=checkpoint, weight_copies=WEIGHT_COPIES
            )
            yield Candidate(name, microbatches, per_rank, checkpoint, tuple(cuts), simulation)


def _border_bytes(captured: Trace, cut: int, lengths: Mapping[str, int]) -> int:
    values = [n.meta["val"] for n in captured.line.crossing(cut)]
    return sum(tensor_spec("crossing", v).bytes(lengths) for v in values if isinstance(v, torch.Tensor))

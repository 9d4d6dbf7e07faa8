"""The planner: stages, replicas, micro-batches, schedule and recomputation, by simulation."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.model import Stages
from intarsia.pipeline.plan.cluster import Cluster, Link
from intarsia.pipeline.plan.search import Candidate, every_candidate, search
from intarsia.pipeline.plan.space import Allowed, LayerLine, Layout, Space, merge
from intarsia.pipeline.schedules import SCHEDULES
from intarsia.pipeline.split import (
    WEIGHT_COPIES,
    cheapest_places,
    choose_cuts,
    crossing_prices,
    make_stages,
    rank_zero,
)
from intarsia.pipeline.stages.profile import cost_source, profile
from intarsia.pipeline.stages.samples import judged
from intarsia.pipeline.stages.trace import Trace, trace

if TYPE_CHECKING:
    from intarsia.pipeline.distributed.options import DistributedKeywords
    from intarsia.pipeline.distributed.pipeline import DistributedPipeline

_MAX_LAYERS = 1024  # longer lines of nodes are merged into this many layers


@dataclass(frozen=True)
class PipelinePlan:
    """The chosen layout, the other candidates, and the stages for the layout."""

    choice: Candidate
    # Fastest first. With `devices`: all layouts that fit; with `cluster`: those that were the best so far.
    candidates: tuple[Candidate, ...]
    refused: int  # with `devices`: how many layouts do not fit the memory
    cluster: Cluster
    stages: Stages
    measured: float | None = None  # seconds of a real step, where one was run

    @property
    def layout(self) -> Layout:
        """How the devices are used."""
        return self.choice

    def distributed(self, **options: Unpack[DistributedKeywords]) -> DistributedPipeline:
        """This rank's part of the plan. `options` are those of `Stages.distributed` (`loss_fn`, ...).

        The plan gives the schedule, the micro-batches and, unless you do, `checkpoint` and the mesh.

        Run it under torchrun with as many processes as the plan has devices. The processes of a replica have
        consecutive numbers. Each step takes one replica's share of the batch.
        """
        layout = self.layout
        world = dist.get_world_size() if dist.is_initialized() else 0
        if world != layout.devices:
            raise PartitionError(
                f"the plan is for {layout.devices} processes, {layout.replicas} replicas of {layout.ranks}"
                f" ranks; {world} take part"
            )
        if layout.replicas > 1 and "mesh" not in options:
            kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
            options["mesh"] = init_device_mesh(
                kind, (layout.replicas, layout.ranks), mesh_dim_names=("data", "pipeline")
            )
        options.setdefault("checkpoint", layout.checkpoint)
        return self.stages.distributed(layout.schedule, layout.microbatches, **options)

    def gpipe(self, **options: Any) -> nn.Module:
        """A module that runs the plan in one process, with a worker for each stage; only for GPipe plans."""
        if self.choice.schedule != "GPipe":
            raise PartitionError(f"schedule={self.choice.schedule!r} needs several processes; GPipe does not")
        checkpoint = "always" if self.choice.checkpoint else "never"
        return self.stages.gpipe(chunks=self.choice.microbatches, checkpoint=checkpoint, **options)

    def __str__(self) -> str:
        lines = [f"chosen   {self.choice}"]
        if self.measured is not None:
            ratio = self.measured / self.choice.step_time
            lines.append(f"measured {self.measured * 1e3:.2f} ms a step, {ratio:.2f} times the prediction")
        lines += [f"         {c}" for c in self.candidates[1:9]]
        if self.refused:
            lines.append(f"         {self.refused} more do not fit the memory")
        return "\n".join(lines)


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
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
    bandwidth: float = 10e9,
    latency: float = 20e-6,
    slack: float = 0.02,
) -> PipelinePlan:
    """The plan that is predicted to train `model` fastest, on batches like `args` over `devices` devices.

    Costs are measured on this machine, at each micro-batch size. `memory` is the bytes of a device, for
    weights, gradients, two moments of the optimizer, and saved activations. `bandwidth` (bytes per second)
    and `latency` (seconds) describe the links. Among the cuts within `slack` of the best balance, the plan
    takes those that the fewest bytes cross.

    `cluster`, a description or its JSON file, replaces `devices`. The plan then also chooses the numbers of
    stages and replicas, for steps of `batch` samples in all (by default, those of the example). Costs are
    measured at two sizes and interpolated linearly. Under torchrun, `agree` makes rank 0 measure and plan for
    all ranks.

    >>> model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    >>> plan = plan_pipeline(model, (torch.randn(8, 16),), devices=2, schedules=["1F1B"], microbatches=[2])
    >>> plan.choice.schedule, len(plan.stages)
    ('1F1B', 2)
    """
    names = tuple(SCHEDULES) if schedules is None else tuple(schedules)
    unknown = [name for name in names if name not in SCHEDULES]
    if unknown:
        raise PartitionError(f"schedule={unknown[0]!r} is none of {', '.join(SCHEDULES)}")
    if cluster is not None:
        if devices is not None or memory is not None:
            raise PartitionError(
                "the cluster says how many devices there are and their memory; give one of them"
            )
        described = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    else:
        if devices is None:
            raise PartitionError("a plan needs devices=, their number, or cluster=, their description")
        if batch is not None or replicas is not None:
            raise PartitionError("batch= and replicas= need cluster=")
        if devices < 1:
            raise PartitionError(f"devices={devices} must be 1 or more")
        link = Link(bandwidth, latency)
        described = Cluster(devices, sys.maxsize, link, link, per_host=devices)
    captured = judged(model, trace(model, args, kwargs), args, kwargs)
    tensors = captured.signature.flatten(args, kwargs)

    def choose() -> _Choice:
        if cluster is not None:
            return _on_cluster(captured, tensors, described, batch, names, microbatches, replicas)
        return _on_devices(captured, tensors, described, names, microbatches, memory, slack)

    layers, candidates, refused = rank_zero(choose) if agree else choose()
    cuts = [layers.places[cut - 1] for cut in candidates[0].cuts]
    stages = make_stages(model, captured, cuts, layers.costs, "time")
    return PipelinePlan(candidates[0], tuple(candidates), refused, described, stages)


def measure(
    plan: PipelinePlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, repeats: int = 3
) -> PipelinePlan:
    """The plan with a measured time next to its prediction: the fastest step of `repeats`.

    In one process, the workers run all forward passes and then all backward passes, so only a GPipe plan can
    be measured. Measure other plans under torchrun.
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
        outputs = pytree.tree_leaves(pipe(*args, **(kwargs or {})))
        roots = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
        seconds.append(time.perf_counter() - begin)
    return replace(plan, measured=min(seconds[1:]))


@dataclass(frozen=True)
class _Layers:
    """A model as a line of layers: their costs, and the places where it may be cut."""

    line: LayerLine
    places: tuple[int, ...]  # of the graph, between layers
    prices: tuple[float, ...]  # of a cut at each place
    costs: tuple[Cost, ...]  # by node, at the example's batch


_Choice = tuple[_Layers, list[Candidate], int]  # the candidates, fastest first, and how many do not fit


def _on_cluster(
    captured: Trace,
    tensors: Sequence[Tensor],
    cluster: Cluster,
    batch: int | None,
    schedules: Sequence[str],
    microbatches: Sequence[int] | None,
    replicas: Sequence[int] | None,
) -> _Choice:
    captured.signature.check_divisible()
    example = captured.signature.samples(tensors)
    least, most = _range(captured, example)
    samples = example if batch is None else batch
    if samples < least:
        raise PartitionError(f"batch={samples} is less than the {least} samples that the model needs")
    layers = _layers(captured, tensors, sorted({least, example}), schedules)
    allowed = Allowed(least, most, schedules, microbatches, replicas)
    return layers, search(Space(layers.line, cluster, samples, allowed, WEIGHT_COPIES)), 0


def _on_devices(
    captured: Trace,
    tensors: Sequence[Tensor],
    cluster: Cluster,
    schedules: Sequence[str],
    microbatches: Sequence[int] | None,
    memory: int | None,
    slack: float,
) -> _Choice:
    """Simulates all layouts for this number of devices: they are few, and the plan lists them."""
    batch = captured.signature.samples(tensors)
    least, most = _range(captured, batch)
    usual = [m for m in (1, 2, 4, 8, 16, 32) if m <= 4 * cluster.devices]
    counts = [m for m in microbatches or usual if batch % m == 0 and batch // m >= least]
    wrong = [m for m in microbatches or () if m not in counts]
    if wrong:
        raise PartitionError(
            f"microbatches={wrong[0]} does not divide a batch of {batch} into parts of {least} or more"
        )
    if any(m > 1 for m in counts):
        captured.signature.check_divisible()
    layers = _layers(captured, tensors, sorted({batch // m for m in counts}), schedules)

    def cut(weights: Any, stages: int) -> list[int]:
        places = range(1, len(layers.line))
        return choose_cuts(weights.tolist(), layers.prices, places, stages, slack=slack)

    allowed = Allowed(least, most, schedules, counts, replicas=[1], ranks=cluster.devices)
    tried = every_candidate(Space(layers.line, cluster, batch, allowed, WEIGHT_COPIES, cut))
    if not tried:
        raise PartitionError(
            f"no schedule of {list(schedules)} runs {counts} micro-batches on {cluster.devices} devices; the"
            f" model can be cut into at most {len(layers.line)} stages"
        )
    fitting = [c for c in tried if memory is None or c.memory <= memory]
    if not fitting:
        leanest = min(tried, key=lambda c: c.memory)
        raise PartitionError(
            f"memory={memory} is too little: the smallest plan takes {leanest.memory} bytes ({leanest})"
        )
    return layers, fitting, len(tried) - len(fitting)


def _range(captured: Trace, example: int) -> tuple[int, int]:
    """The least and the most samples of a micro-batch; both are `example` if the graph has a fixed batch."""
    least, most = captured.signature.ranges.get(str(captured.signature.batch), (example, example))
    return max(1, least), most


def _layers(
    captured: Trace, tensors: Sequence[Tensor], sizes: Sequence[int], schedules: Sequence[str]
) -> _Layers:
    """The layers of the model, with costs measured at each micro-batch size in `sizes`."""
    axes = captured.signature.tensor_axes
    source = cost_source(captured)
    apart = any(SCHEDULES[name].splits_backward for name in schedules)
    runs = []
    for size in sizes:
        part = [t if a is None else t.narrow(a, 0, size) for t, a in zip(tensors, axes, strict=True)]
        runs.append((size, profile(captured, part, source=source, apart=apart)))
    costs, example = runs[-1][1], captured.signature.samples(tensors)
    prices = crossing_prices(captured)
    sums = list(accumulate((c.seconds for c in costs), initial=0.0))
    places = cheapest_places(captured.line.allowed, sums, prices, _MAX_LAYERS)
    layers = [(size, merge(measured, places)) for size, measured in runs]
    # Bytes are read from the graph, which has the example's batch.
    crossing = [captured.line.crossing_bytes[p] / example for p in places]
    saved = [c.saved / example for c in layers[-1][1]]
    line = LayerLine.of(layers, [*crossing, 0.0], saved)
    return _Layers(line, tuple(places), (0.0, *(prices[p] for p in places), 0.0), tuple(costs))

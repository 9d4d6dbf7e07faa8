"""A model's pipeline for a described cluster: stages, replicas, micro-batches, schedule, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from intarsia.errors import PartitionError
from intarsia.pipeline.cluster.cluster import Cluster
from intarsia.pipeline.cluster.layers import LayerLine, merge
from intarsia.pipeline.cluster.search import Found, search
from intarsia.pipeline.cluster.space import Layout, Space
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.model import Stages
from intarsia.pipeline.split import WEIGHT_COPIES, crossing_prices, make_stages
from intarsia.pipeline.stages.cost import profile
from intarsia.pipeline.stages.samples import judged
from intarsia.pipeline.stages.trace import Trace, trace

if TYPE_CHECKING:
    from intarsia.pipeline.distributed.pipeline import DistributedPipeline

_LAYERS = 1024  # the most layers a line is merged into


@dataclass(frozen=True)
class ClusterPlan:
    """The fastest way found for a cluster, those that were the best before it, and the stages cut for it."""

    choice: Found
    candidates: tuple[Found, ...]
    cluster: Cluster
    stages: Stages

    @property
    def layout(self) -> Layout:
        """How the cluster is used."""
        return self.choice.layout

    def distributed(self, **options: Any) -> DistributedPipeline:
        """This rank's part of the plan; `options` are those of `Stages.distributed` (`loss_fn`, ...).

        Under torchrun with as many processes as the plan has devices: those of a replica are numbered one
        after the other. Each step takes one replica's share of the batch.
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
        return self.stages.distributed(
            layout.schedule, layout.microbatches, checkpoint=layout.checkpoint, **options
        )

    def __str__(self) -> str:
        lines = [f"chosen  {self.choice}"]
        lines += [f"        {f}" for f in self.candidates[1:4]]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Chosen:
    """What the search found, in places of the graph."""

    found: tuple[Found, ...]
    cuts: tuple[int, ...]
    costs: tuple[Cost, ...]  # by node, at the example's batch


def plan_on_cluster(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    cluster: Cluster,
    *,
    batch: int | None = None,
    schedules: Sequence[str],
    microbatches: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    agree: bool = False,
) -> ClusterPlan:
    """The fastest predicted way to train `model` on a cluster, in steps of `batch` samples over all replicas.

    Costs are measured here, with the example's batch and with one as small as the model takes; between and
    beyond them they are taken as a line. With `agree` rank 0 measures and plans for all.
    """
    captured = judged(model, trace(model, args, kwargs), args, kwargs)
    ways = schedules, microbatches, replicas

    def choose() -> _Chosen:
        return _choose(captured, captured.signature.flatten(args, kwargs), cluster, batch, *ways)

    chosen = _rank_zero(choose) if agree else choose()
    stages = make_stages(model, captured, chosen.cuts, chosen.costs, "time")
    return ClusterPlan(chosen.found[0], chosen.found, cluster, stages)


def _choose(
    captured: Trace,
    tensors: Sequence[Tensor],
    cluster: Cluster,
    batch: int | None,
    schedules: Sequence[str],
    microbatches: Sequence[int] | None,
    replicas: Sequence[int] | None,
) -> _Chosen:
    signature = captured.signature
    signature.check_divisible()
    axes = [signature.axis(s) for s in signature.tensors]
    example = next((t.shape[a] for t, a in zip(tensors, axes, strict=True) if a is not None), 1)
    # A batch that the capture fixed can be divided in one way only.
    least, most = signature.ranges.get(str(signature.batch), (example, example))
    least, total = max(1, least), example if batch is None else batch
    if total < least:
        raise PartitionError(f"batch={total} is less than the {least} samples the model takes at least")
    runs = []
    for size in sorted({least, example}):
        part = [t if a is None else t.narrow(a, 0, size) for t, a in zip(tensors, axes, strict=True)]
        runs.append((size, profile(captured, part)))
    costs = runs[-1][1]
    places = _places(captured, costs)
    layers = [(size, merge(measured, places)) for size, measured in runs]
    # These were read from the graph, at the example's batch.
    crossing = [captured.line.crossing_bytes[p] / example for p in places]
    saved = [c.saved / example for c in layers[-1][1]]
    line = LayerLine.measured(layers, [*crossing, 0.0], saved)
    found = search(Space(line, cluster, total, least, most, schedules, microbatches, replicas, WEIGHT_COPIES))
    return _Chosen(tuple(found), tuple(places[c - 1] for c in found[0].cuts), tuple(costs))


def _rank_zero(choose: Callable[[], _Chosen]) -> _Chosen:
    """What rank 0 chose, or the reason why it could not, on every rank."""
    if not dist.is_initialized():
        raise PartitionError("agree=True needs torch.distributed.init_process_group first")
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [choose()]
        except PartitionError as error:
            told = [str(error)]
    dist.broadcast_object_list(told, src=0)
    if not isinstance(told[0], _Chosen):
        raise PartitionError(told[0])
    return told[0]


def _places(captured: Trace, costs: Sequence[Cost]) -> list[int]:
    """The places a cut may take: all allowed ones or, of many, the cheapest in each stretch of equal time."""
    allowed = list(captured.line.allowed)
    if len(allowed) < _LAYERS:
        return allowed
    prices = crossing_prices(captured)
    whole = sum(c.seconds for c in costs) or 1.0
    best: dict[int, int] = {}
    done, at = 0.0, 0
    for place in allowed:
        done += sum(c.seconds for c in costs[at:place])
        at = place
        stretch = int(done / whole * _LAYERS)
        if stretch not in best or prices[place] < prices[best[stretch]]:
            best[stretch] = place
    return sorted(best.values())

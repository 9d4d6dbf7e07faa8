"""Cutting any model into balanced stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from intarsia.errors import CaptureError, PartitionError
from intarsia.pipeline.cost import Cost, total
from intarsia.pipeline.model import Stages
from intarsia.pipeline.stages.cost import profile, saved_bytes, weight_bytes
from intarsia.pipeline.stages.cut import choose_cuts
from intarsia.pipeline.stages.flow import Flow
from intarsia.pipeline.stages.sequence import SplitReport
from intarsia.pipeline.stages.signature import TensorSpec
from intarsia.pipeline.stages.stage import Stage, build_stages
from intarsia.pipeline.stages.tied import find_tied
from intarsia.pipeline.stages.trace import trace
from intarsia.pipeline.stages.tree import split_tree

By = Literal["time", "memory"]

# A weight stands in memory with its gradient and an optimizer's two moments.
WEIGHT_COPIES = 4


def split(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int = 4,
    by: By = "time",
    cuts: Sequence[int | str] | None = None,
    speeds: Sequence[float] | None = None,
    memory: Sequence[int] | None = None,
    in_flight: int = 1,
    slack: float = 0.1,
    dynamic_batch: bool = True,
    agree: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Stages:
    """Cut `model` into `stages` balanced parts, by its graph, or by its modules where it cannot be exported.

    `args` and `kwargs` are an example call; where the model lets it, the batch length stays open. `by="time"`
    balances measured forward and backward seconds, `by="memory"` weights and what backward keeps, of
    `in_flight` micro-batches. `speeds` and `memory` (bytes) describe unequal devices. Among cuts within
    `slack` of the best balance the one with the fewest bytes across is taken, and tied weights stay together
    if they can. `cuts` gives the places by hand: node numbers, or names of nodes a stage begins with. Times
    measured by several processes differ: with `agree` every rank of torch.distributed takes rank 0's cuts.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> parts = split(model, (torch.randn(2, 4),), stages=2)
    >>> len(parts), list(parts.state_dict()) == list(model.state_dict())
    (2, True)
    """
    if by not in ("time", "memory"):
        raise PartitionError(f"by={by!r} is neither 'time' nor 'memory'")
    if stages < 1:
        raise PartitionError(f"stages={stages} must be 1 or more")
    try:
        captured = trace(model, args, kwargs, dynamic_batch=dynamic_batch)
    except CaptureError as error:
        parts = split_tree(model, args, kwargs, stages=stages, by=by, reason=str(error))
        return Stages(list(parts), parts.signature, parts.report, parts.keys)
    flow = Flow(captured)
    tensors = captured.signature.flatten(args, kwargs)
    costs = (
        profile(flow, tensors, progress=progress)
        if by == "time"
        else [Cost(saved=s, weights=w) for s, w in zip(saved_bytes(flow), weight_bytes(flow), strict=True)]
    )
    footprint = [float(c.saved * in_flight + c.weights * WEIGHT_COPIES) for c in costs]
    places = (
        _by_hand(flow, cuts)
        if cuts is not None
        else choose_cuts(
            [c.seconds for c in costs] if by == "time" else footprint,
            crossing_prices(flow),
            flow.allowed,
            stages,
            slack=slack,
            speeds=speeds,
            memory=footprint,
            caps=memory,
        )
    )
    if agree:
        places = _rank_zero(places)
    return make_stages(model, flow, places, costs, by)


def make_stages(
    model: nn.Module, flow: Flow, places: Sequence[int], costs: Sequence[Cost], by: str
) -> Stages:
    """The stages of a model whose cuts are known."""
    parts = build_stages(flow, places)
    report = _report(flow, places, costs, parts, by)
    return Stages(parts, flow.trace.signature, report, list(model.state_dict()))


def crossing_prices(flow: Flow) -> list[float]:
    """What a cut costs at each place: the bytes that cross, and the tied weights it would separate."""
    prices = [float(b) for b in flow.crossing_bytes()]
    spans: dict[int, tuple[int, int, int]] = {}
    for i, node in enumerate(flow.nodes):
        for value in node.all_input_nodes:
            state = flow.trace.states.get(value)
            if state is not None and state.tensor.requires_grad:
                first = spans.get(id(state), (i, i, state.bytes))[0]
                spans[id(state)] = (first, i, state.bytes)
    for first, last, size in spans.values():
        for cut in range(first + 1, last + 1):
            prices[cut] += size
    return prices


def _rank_zero(places: list[int]) -> list[int]:
    if not dist.is_initialized():
        raise PartitionError("agree=True needs torch.distributed.init_process_group first")
    told: list[Any] = [places]
    dist.broadcast_object_list(told, src=0)
    return list(told[0])


def _by_hand(flow: Flow, cuts: Sequence[int | str]) -> list[int]:
    names = {n.name: i for i, n in enumerate(flow.nodes)}
    places = []
    for cut in cuts:
        if isinstance(cut, str) and cut not in names:
            raise PartitionError(f"cuts names {cut!r}, which is no node of the graph")
        places.append(names[cut] if isinstance(cut, str) else cut)
    return places


def _report(
    flow: Flow, places: Sequence[int], costs: Sequence[Cost], parts: Sequence[Stage], by: str
) -> SplitReport:
    bounds = [0, *places, len(flow.nodes)]
    sums = [total(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    borders = [p.piece.outputs for p in parts[:-1]]
    lengths = flow.trace.signature.example
    crossing = [
        sum(s.bytes(lengths) if isinstance(s, TensorSpec) else 8 for s in border) for border in borders
    ]
    return SplitReport("graph", "", by, tuple(sums), tuple(borders), tuple(crossing), find_tied(parts))

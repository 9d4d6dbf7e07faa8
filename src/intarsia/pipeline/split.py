"""Cutting any model into balanced stages."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from intarsia.capture.input import check_model
from intarsia.errors import CaptureError, IntarsiaError, PartitionError, error_text
from intarsia.graph.line import Line
from intarsia.graph.piece import place_of, places_of
from intarsia.graph.plan import Plan
from intarsia.pipeline.cost import Cost, total
from intarsia.pipeline.model import Stages
from intarsia.pipeline.solver import balance_problem
from intarsia.pipeline.stages.profile import DeviceSpeed, cost_source, memory_costs, profile
from intarsia.pipeline.stages.program import buffers_on_meta, computed_buffers, is_on_meta, to_meta
from intarsia.pipeline.stages.samples import judged
from intarsia.pipeline.stages.sequence import SplitReport
from intarsia.pipeline.stages.signature import BatchDims, TensorSpec
from intarsia.pipeline.stages.stage import Stage, build_stages, recompute_modules
from intarsia.pipeline.stages.tied import find_tied
from intarsia.pipeline.stages.trace import Trace, trace
from intarsia.pipeline.stages.tree import split_tree

By = Literal["time", "memory"]
Choice = TypeVar("Choice")

# In training, memory holds each weight with its gradient and the optimizer's two moments.
WEIGHT_COPIES = 4
_CANDIDATES = 400  # places that are considered for cuts


def split(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int | None = None,
    by: By = "time",
    cuts: Sequence[int | str] | Plan | None = None,
    speeds: Sequence[float] | None = None,
    memory: Sequence[int] | None = None,
    in_flight: int = 1,
    slack: float = 0.02,
    dynamic_batch: bool = True,
    dynamic_shapes: Any = None,
    batch_dims: BatchDims | None = None,
    agree: bool = False,
    checkpoint: Sequence[str] = (),
    way: Literal["graph", "modules"] = "graph",
    costs: Literal["measured", "analytic"] | DeviceSpeed = "measured",
    progress: Callable[[int, int], None] | None = None,
) -> Stages:
    """Cut a model into balanced stages, by its graph, or along its modules if it cannot be exported.

    Among the cuts within `slack` of the best balance, `split` takes those that the fewest bytes cross. Tied
    weights stay in one stage if possible. A model on the meta device is cut without memory for its weights:
    each kind of node is measured alone, and `Stages.load` reads the weights.

    Args:
        model: the model, in training or in evaluation.
        args: an example of its arguments by position.
        kwargs: an example of its arguments by name.
        stages: the number of stages; 4 by default.
        by: `"time"` balances the measured seconds of both passes. `"memory"` balances the bytes of weights
            and saved activations.
        cuts: your own cuts: numbers of nodes, names of nodes, or names of modules that a stage begins with
            (`"encoder.layer.6"`), or a `Plan` of this model whose segments become the stages.
        speeds: relative speeds of unequal devices.
        memory: bytes of unequal devices.
        in_flight: micro-batches whose activations count for `by="memory"`.
        slack: how much worse than the best balance a cut may be.
        dynamic_batch: let the batch length vary if the model allows it.
        dynamic_shapes: other sizes that may vary, as for `torch.export.export`.
        batch_dims: the batch axis of each tensor, by position or by name; None gives the whole tensor to
            every micro-batch. By default, the graph or a run of a larger batch decides.
        agree: every rank of torch.distributed uses the cuts of rank 0, since measured times differ.
        checkpoint: modules, or patterns such as `"encoder.layer.*"`, that are computed again in the backward
            pass.
        way: `"modules"` cuts between the calls of modules, also where the graph can be captured: stages then
            call the model's own modules, as tensor parallel plans need.
        costs: `"measured"`, `"analytic"` (from operations and bytes), or a `DeviceSpeed`.
        progress: called with the number of measured nodes and the number of all nodes.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> parts = split(model, (torch.randn(2, 4),), stages=2)
    >>> len(parts), list(parts.state_dict()) == list(model.state_dict())
    (2, True)
    """
    check_model(model, nn.Module)
    if way not in ("graph", "modules"):
        raise PartitionError(f"way={way!r} is neither 'graph' nor 'modules'")
    if by not in ("time", "memory"):
        raise PartitionError(f"by={by!r} is neither 'time' nor 'memory'")
    if isinstance(cuts, str):
        raise PartitionError(f"cuts={cuts!r} is a single cut; give a list")
    if slack < 0:
        raise PartitionError(f"slack={slack} must be 0 or more")
    if in_flight < 1:
        raise PartitionError(f"in_flight={in_flight} must be 1 or more")
    if in_flight > 1 and by != "memory" and memory is None:
        raise PartitionError(
            f"in_flight={in_flight} has no effect without by='memory' or memory=: it counts the micro-batches"
            " whose activations are in memory"
        )
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool)):
        raise PartitionError(f"stages={stages!r} must be a whole number")
    count = _count(stages, cuts)
    if not isinstance(costs, DeviceSpeed) and costs not in ("measured", "analytic"):
        raise PartitionError(f"costs={costs!r} is neither 'measured' nor 'analytic' nor a DeviceSpeed")
    if is_on_meta(model):
        args, kwargs = to_meta((tuple(args), dict(kwargs or {})))

    def places(line: Line, costs: Sequence[Cost], prices: Sequence[float]) -> list[int]:
        if isinstance(cuts, Plan):
            return places_of(line, cuts)
        if cuts is not None:
            return [place_of(line, cut) for cut in cuts]
        footprint = [float(c.saved * in_flight + c.weights * WEIGHT_COPIES) for c in costs]
        return choose_cuts(
            [c.seconds for c in costs] if by == "time" else footprint,
            prices,
            _allowed_places(line, count),
            count,
            slack=slack,
            speeds=speeds,
            memory=footprint,
            caps=memory,
        )

    def choose(line: Line, costs: Sequence[Cost], prices: Sequence[float]) -> list[int]:
        return rank_zero(lambda: places(line, costs, prices)) if agree else places(line, costs, prices)

    values: dict[str, torch.Tensor] = {}
    mixes = ""
    try:
        if way == "modules":
            raise CaptureError("way='modules' was requested")
        with buffers_on_meta(model) if is_on_meta(model) else nullcontext(values) as values:
            captured = trace(
                model,
                args,
                kwargs,
                dynamic_batch=dynamic_batch,
                dynamic_shapes=dynamic_shapes,
                batch_dims=batch_dims,
            )
            captured = judged(model, captured, args, kwargs)
            mixes = captured.signature.mixes
            node_costs, source = _node_costs(captured, args, kwargs, by, costs, progress)
    except CaptureError as error:
        if is_on_meta(model):
            raise CaptureError(
                f"the graph cannot be captured ({error}); to cut the model along its modules, it must"
                " run, which the meta device cannot do"
            ) from error
        unused = {"costs": costs != "measured", "dynamic_shapes": dynamic_shapes is not None}
        without_effect = [f"{name}=" for name, is_given in unused.items() if is_given]
        if without_effect:
            warnings.warn(
                f"{' and '.join(without_effect)} have no effect: the model is cut along its modules"
                f" ({error})",
                stacklevel=2,
            )
        parts = split_tree(
            model,
            args,
            kwargs,
            stages=count,
            by=by,
            reason=str(error),
            choose=choose,
            batch_dims=batch_dims,
            mixes=mixes,
        )
        if checkpoint:
            recompute_modules(parts, checkpoint)
        return Stages(list(parts), parts.signature, parts.report, parts.keys)
    chosen = choose(captured.line, node_costs, crossing_prices(captured))
    result = make_stages(model, captured, chosen, node_costs, by, source, computed_buffers(model) | values)
    if checkpoint:
        recompute_modules(result, checkpoint)
    return result


def _node_costs(
    captured: Trace,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    by: By,
    costs: Literal["measured", "analytic"] | DeviceSpeed,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Cost], str]:
    """The cost of each node, and the source of the costs. Raises CaptureError if a node cannot run alone.

    For example, the size of `x[x > 0]` depends on data, and `unique` has no backward formula.
    """
    try:
        if by == "memory":
            return memory_costs(captured), ""
        source = cost_source(captured, costs)
        tensors = captured.signature.flatten(args, kwargs)
        return profile(captured, tensors, progress=progress, source=source), str(source)
    except IntarsiaError:
        raise
    except Exception as error:  # torch raises many types, depending on the operator
        raise CaptureError(f"its nodes cannot be measured one by one: {error_text(error)}") from error


def _count(stages: int | None, cuts: Sequence[int | str] | Plan | None) -> int:
    """The number of stages. Raises PartitionError if `stages` and `cuts` disagree."""
    if cuts is None:
        count = 4 if stages is None else stages
    else:
        count = len(cuts) if isinstance(cuts, Plan) else len(cuts) + 1
        if stages is not None and stages != count:
            raise PartitionError(f"stages={stages}, but cuts={cuts} make {count} stages; give one of them")
    if count < 1:
        raise PartitionError(f"stages={count} must be 1 or more")
    return count


def make_stages(
    model: nn.Module,
    captured: Trace,
    places: Sequence[int],
    costs: Sequence[Cost],
    by: str,
    source: str = "",
    buffer_values: Mapping[str, torch.Tensor] | None = None,
) -> Stages:
    """The stages of a model that is cut at `places`."""
    parts = build_stages(captured, places)
    report = _report(captured, places, costs, parts, by, source)
    return Stages(parts, captured.signature, report, list(model.state_dict()), buffer_values)


def crossing_prices(captured: Trace) -> list[float]:
    """The price of a cut at each place: the bytes that cross it, and the tied weights that it separates."""
    prices = [float(b) for b in captured.line.crossing_bytes]
    spans: dict[int, tuple[int, int, int]] = {}
    for i, node in enumerate(captured.line.nodes):
        for value in node.all_input_nodes:
            state = captured.states.get(value)
            if state is not None and state.tensor.requires_grad:
                first = spans.get(id(state), (i, i, state.bytes))[0]
                spans[id(state)] = (first, i, state.bytes)
    for first, last, size in spans.values():
        for cut in range(first + 1, last + 1):
            prices[cut] += size
    return prices


def choose_cuts(
    weights: Sequence[float],
    crossing: Sequence[float],
    allowed: Sequence[int],
    stages: int,
    *,
    slack: float = 0.05,
    speeds: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    caps: Sequence[float] | None = None,
) -> list[int]:
    """The cuts with the fewest crossing bytes, among those within `slack` of the lightest heaviest stage.

    `weights[i]` is the cost of node `i`; `crossing[c]` the bytes that cross a cut before node `c`. A stage's
    weight is divided by its speed in `speeds`. The sum of `memory` over a stage is at most its cap in `caps`.
    With a slack of 10 %, cuts were 90 % balanced although 99 % was possible, which slows every step. 2 %, the
    default of `split`, is the resolution of measured costs.

    >>> choose_cuts([1, 1, 1, 1], [0, 9, 1, 9, 0], [1, 2, 3], 2)
    [2]
    """
    if stages < 1:
        raise PartitionError(f"stages={stages} must be 1 or more")
    if len(allowed) < stages - 1:
        raise PartitionError(f"stages={stages} needs {stages - 1} cuts; the graph allows {len(allowed)}")
    sums = [0.0, *accumulate(weights)]
    bounds = np.array(
        [0, *cheapest_places(allowed, sums, crossing, max(_CANDIDATES, 4 * stages)), len(weights)]
    )
    costs = np.diff(np.array(sums)[bounds])
    sizes = None if memory is None else np.diff(np.concatenate([[0.0], np.cumsum(memory)])[bounds])
    try:
        problem = balance_problem(costs, stages, sizes, caps, speeds)
    except ValueError as error:
        raise PartitionError(str(error)) from error
    best = problem.least_bottleneck()
    if best is None:
        raise PartitionError(f"no cut into {stages} stages fits the memory caps {caps}")
    prices = np.array([0.0, *crossing[1:]])[bounds]
    # Slightly more than the slack, since sums in another order differ in the last bits.
    cuts = problem.cheapest(best * (1 + slack + 1e-9), lambda stage, starts, ends: prices[starts])
    assert cuts is not None
    return [int(bounds[cut]) for cut in cuts[1:-1]]


def cheapest_places(
    places: Sequence[int], sums: Sequence[float], crossing: Sequence[float], most: int
) -> list[int]:
    """About `most` of these places: the cheapest cut in each stretch of equal weight.

    `sums[i]` is the weight before place `i`.
    """
    if len(places) <= most:
        return list(places)
    step = (sums[-1] or 1.0) / most
    best: dict[int, int] = {}
    for place in places:
        stretch = int(sums[place] / step)
        if stretch not in best or crossing[place] < crossing[best[stretch]]:
            best[stretch] = place
    return sorted(best.values())


def _allowed_places(line: Line, stages: int) -> Sequence[int]:
    """The places where the graph may be cut. Raises PartitionError, with the reason, if they are too few."""
    if len(line.allowed) < stages - 1 and line.closed:
        reason = Counter(line.closed.values()).most_common(1)[0][0]
        raise PartitionError(
            f"stages={stages} needs {stages - 1} cuts; the graph allows {len(line.allowed)}: {reason},"
            " and a cut may not separate a value from an in-place change of it"
        )
    return line.allowed


def rank_zero(choose: Callable[[], Choice]) -> Choice:
    """The choice of rank 0, on every rank; if rank 0 raises PartitionError, every rank does."""
    if not dist.is_initialized():
        raise PartitionError("agree=True needs torch.distributed.init_process_group first")
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            shared[0] = choose()
        except PartitionError as error:
            shared[1] = str(error)
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise PartitionError(shared[1])
    choice: Choice = shared[0]
    return choice


def _report(
    captured: Trace,
    places: Sequence[int],
    costs: Sequence[Cost],
    parts: Sequence[Stage],
    by: str,
    source: str,
) -> SplitReport:
    bounds = [0, *places, len(captured.line.nodes)]
    sums = [total(costs[a:b]) for a, b in pairwise(bounds)]
    sums[0] = sums[0].first()
    borders = [p.form.gives for p in parts[:-1]]
    lengths = captured.signature.example
    crossing = [
        sum(s.bytes(lengths) if isinstance(s, TensorSpec) else 8 for s in border) for border in borders
    ]
    waists = tuple(map(captured.line.waist, places))
    return SplitReport(
        "graph",
        "",
        by,
        tuple(sums),
        tuple(borders),
        tuple(crossing),
        find_tied(parts),
        waists,
        source,
        captured.changed_buffers(),
        captured.checkpointed,
        next((part.not_recomputed for part in parts if part.not_recomputed), ""),
        captured.signature.mixes,
    )

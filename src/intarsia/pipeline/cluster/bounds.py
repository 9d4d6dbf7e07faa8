"""What a layout cannot fall below, in closed form: before it is cut, and with its cuts known.

Rank r starts when the first micro-batch has come to it (P the work of the stages before it, forward), does m
times its own work w, and what it gave must travel back: T >= P + m * w for every rank. Of all cuts of a total
W over n ranks, the one that is even in this sense has T = W / (1 - (1 - 1/m) ** n).
"""

from __future__ import annotations

import numpy as np

from intarsia.pipeline.cluster.layers import StageTable, Vector, Whole
from intarsia.pipeline.cluster.space import Layout, Space

Group = tuple[str, int, bool, int, int, int]  # schedule, stages a rank, recompute, replicas, m, samples


def least_memory(space: Space, group: Group, ranks: Whole) -> Vector:
    """Bytes the fullest of so many ranks holds at least: the mean of all, or the largest layer's weights."""
    name, _, recompute, _, m, samples = group
    weights = space.line.weights * space.weight_copies
    kept = 0.0 if recompute else float(space.line.saved.sum()) * samples * (m if name == "GPipe" else 1)
    mean: Vector = (float(weights.sum()) + kept) / ranks
    return np.maximum(mean, float(weights.max()))


def least_seconds(space: Space, group: Group, ranks: Whole) -> Vector:
    """Seconds of a step at least, whatever the cuts."""
    name, per_rank, recompute, replicas, m, samples = group
    cluster, stages = space.cluster, ranks * per_rank
    hand = np.where(stages > 1, cluster.handover, 0.0)
    passes = space.line.seconds(samples, cluster.speed)
    layers = passes.sum(axis=0) + (passes[0] if recompute else 0.0)
    work = layers.sum() + 2 * hand * stages
    bound = m * np.maximum(work / ranks, layers.max() + 2 * hand)
    if name in ("GPipe", "1F1B"):
        travel = work
        bound = np.maximum(bound, work / (1 - (1 - 1 / m) ** ranks))
    elif name == "ZeroBubble":
        # What comes before a rank is forward passes alone: of each stage's work at least this part.
        real = layers > 0
        part = min([0.5, *(passes[0][real] / layers[real]).tolist()])
        travel = passes[:2].sum() + 2 * hand * stages
        if part > 0:
            bound = np.maximum(bound, part * work / (1 - (1 - part / m) ** ranks))
    else:
        travel = work
    bound = np.maximum(bound, travel + 2 * (stages - 1) * _least_link(space, samples))
    if replicas == 1:
        return np.asarray(bound)
    rounds = 2 * (replicas - 1)
    inside = ranks * replicas <= cluster.per_host
    latency = np.where(inside, cluster.within.latency, cluster.between.latency) * rounds
    bandwidth = np.where(inside, cluster.within.bandwidth, cluster.between.bandwidth)
    mean = rounds / replicas * float(space.line.weights.sum()) / ranks / bandwidth
    return np.asarray(np.maximum(bound + latency, m * work / ranks + latency + mean))


def near_seconds(layout: Layout, table: StageTable, links: Vector, averaging: Vector) -> float:
    """Seconds of a step at least, with the cuts known."""
    n, m = layout.ranks, layout.microbatches
    work = table.work(layout.checkpoint)
    own = work.reshape(layout.per_rank, n).sum(axis=0)
    forward = table.seconds[0][:n] + table.handover
    back = work[:n] - forward
    if layout.schedule == "ZeroBubble":
        back = np.zeros(n)  # weight gradients may run while the others' gradients travel
    wires = links[: n - 1] * (1 if layout.schedule == "ZeroBubble" else 2)
    before = np.concatenate([[0.0], np.cumsum((forward + back)[:-1] + wires)])
    travel = float((table.seconds[:2] + table.handover).sum() + 2 * links.sum())
    return max(float((before + m * own).max() + averaging.min()), float((m * own + averaging).max()), travel)


def near_memory(layout: Layout, table: StageTable, weight_copies: int) -> Vector:
    """Bytes of each rank at least, with the cuts known."""
    n, m = layout.ranks, layout.microbatches
    base = table.weights * weight_copies
    if layout.checkpoint:
        held = base + table.saved
    elif layout.schedule == "GPipe":
        held = base + table.saved * m
    elif layout.schedule == "1F1B":
        held = base + table.saved * np.minimum(m, n - np.arange(n))
    else:
        held = base + table.saved
    by_rank: Vector = held.reshape(layout.per_rank, n).sum(axis=0)
    return by_rank


def _least_link(space: Space, samples: int) -> float:
    cluster = space.cluster
    bytes_ = float(space.line.crossing[:-1].min()) * samples if len(space.line) > 1 else 0.0
    return min(cluster.within.seconds(bytes_), cluster.between.seconds(bytes_))

"""The simulation of a schedule for many ranks: all that can run next is taken in one step, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from intarsia.errors import PartitionError
from intarsia.pipeline.cluster.layers import StageTable, Vector, Whole

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)


@dataclass(frozen=True)
class Order:
    """The slots of every rank as arrays of ranks x slots; the same as `schedule` makes one by one."""

    actions: Whole
    stages: Whole
    microbatches: Whole
    per_rank: int

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.actions)


def order(name: str, ranks: int, m: int, per_rank: int = 1) -> Order:
    """The slots of a schedule.

    >>> order("1F1B", 2, 2).actions.tolist(), order("1F1B", 2, 2).microbatches.tolist()
    ([[0, 0, 1, 1], [0, 1, 0, 1]], [[0, 1, 0, 1], [0, 0, 1, 1]])
    """
    rank = np.arange(ranks)[:, None]
    total = m * per_rank
    i = np.arange(total)[None, :]
    if name == "GPipe":
        ahead = np.full_like(rank, total)
    elif name == "Interleaved1F1B":
        ahead = np.minimum(total, (per_rank - 1) * ranks + 2 * (ranks - rank - 1))
    elif name in ("1F1B", "ZeroBubble"):
        ahead = np.minimum(ranks - rank - 1, m)
    else:
        raise PartitionError(f"schedule={name!r} is none that can be simulated on a cluster")
    forward = np.where(i < ahead, i, 2 * i - ahead)
    backward = np.where(i < total - ahead, ahead + 2 * i + 1, total + i)
    if name == "ZeroBubble":
        return _zero_bubble(rank, i, ahead, forward, backward)
    # Micro-batches go round in groups of `ranks`: each group through every stage of the rank.
    group, inside = np.divmod(i, ranks * per_rank)
    turn, offset = np.divmod(inside, ranks)
    micro = np.broadcast_to(group * ranks + offset if per_rank > 1 else i, forward.shape)
    turn = np.broadcast_to(turn if per_rank > 1 else np.zeros_like(i), forward.shape)
    empty = np.zeros((ranks, 2 * total), np.int64)
    actions, stages, microbatches = empty, empty.copy(), empty.copy()
    for place, action, which in ((forward, FORWARD, turn), (backward, BACKWARD, per_rank - 1 - turn)):
        np.put_along_axis(actions, place, action, axis=1)
        np.put_along_axis(stages, place, which * ranks + rank, axis=1)
        np.put_along_axis(microbatches, place, micro, axis=1)
    return Order(actions, stages, microbatches, per_rank)


def _zero_bubble(rank: Whole, i: Whole, ahead: Whole, forward: Whole, backward: Whole) -> Order:
    """1F1B whose weight gradients wait, on rank r for r micro-batches."""
    ranks, m = forward.shape
    inputs = backward + np.maximum(0, i - rank)
    waiting = np.minimum(i + rank, m - 1)  # the micro-batch whose gradient of inputs a weight pass follows
    weights = np.where(i + rank < m, np.take_along_axis(inputs, waiting, axis=1) + 1, 2 * m + i)
    places = (
        (forward + np.maximum(0, i - ahead - rank), FORWARD),
        (inputs, INPUT),
        (weights, WEIGHT),
    )
    actions, microbatches = np.zeros((2, ranks, 3 * m), np.int64)
    for place, action in places:
        np.put_along_axis(actions, place, action, axis=1)
        np.put_along_axis(microbatches, place, np.broadcast_to(i, place.shape), axis=1)
    return Order(actions, np.broadcast_to(rank, actions.shape), microbatches, 1)


def play(order: Order, table: StageTable, links: Vector, recompute: bool = False) -> Vector:
    """When each rank has ended; `links[i]` is the seconds from stage i to the next, and back."""
    ranks, slots = order.actions.shape
    count, m = table.seconds.shape[1], int(order.microbatches.max()) + 1
    actions, stages = order.actions.ravel(), order.stages.ravel()
    micro = order.microbatches.ravel()
    # One row of ends for each stage, forward and backward, between two rows of zeros; one place for what
    # nobody waits for.
    ends = np.full(2 * (count + 2) * m + 1, np.inf)
    ends[:m] = 0.0
    ends[-1 - m : -1] = 0.0
    forward, weight = actions == FORWARD, actions == WEIGHT
    need = np.where(forward, stages * m, (count + 2 + stages + 2) * m) + micro
    give = np.where(forward, (stages + 1) * m, (count + 2 + stages + 1) * m) + micro
    need[weight], give[weight] = 0, len(ends) - 1
    wires = np.concatenate([[0.0], links, [0.0]])
    wait = np.where(forward, wires[stages], wires[stages + 1])
    wait[weight] = 0.0
    forward_pass, inputs, weights = table.seconds
    whole = inputs + weights + (forward_pass if recompute else 0.0)
    # A stage that is computed again gives the gradients of its weights with those of its inputs.
    parts = (whole, np.zeros(count)) if recompute else (inputs, weights)
    passes = np.stack([forward_pass, whole, *parts])
    passes[:WEIGHT] += table.handover
    seconds = passes[actions, stages]
    clock, place = np.zeros(ranks), np.arange(ranks) * slots
    stop = place + slots
    live = np.arange(ranks)
    while len(live):
        at = place[live]
        ready = ends[need[at]] + wait[at]
        can = ready < np.inf
        if not can.any():
            raise PartitionError("the schedule waits for itself")
        going, at = live[can], at[can]
        end = np.maximum(clock[going], ready[can]) + seconds[at]
        clock[going] = ends[give[at]] = end
        place[going] += 1
        live = live[place[live] < stop[live]]
    return clock


def peak_memory(order: Order, table: StageTable, recompute: bool, weight_copies: int) -> Vector:
    """The most bytes each rank holds: the sum over its stages, their peaks taken as one."""
    found = np.zeros(order.ranks)
    for turn in range(order.per_rank):
        stage = np.arange(order.ranks) + turn * order.ranks
        own = order.stages == stage[:, None]
        begins = own & (order.actions == FORWARD)
        ends = own & ((order.actions == BACKWARD) | (order.actions == WEIGHT))
        back = own & ((order.actions == BACKWARD) | (order.actions == INPUT))
        held = np.cumsum(begins.astype(np.int64) - ends, axis=1) + ends
        entering = np.concatenate([[0.0], table.borders])[stage]
        kept = entering if recompute else table.saved[stage]
        peak = kept * np.where(own, held, 0).max(axis=1)
        if recompute:
            peak = np.maximum(peak, kept * np.where(back, held, 0).max(axis=1) + table.saved[stage])
        found += peak + table.weights[stage] * weight_copies
    return found

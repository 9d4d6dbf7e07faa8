"""Repair after the plan: find the nodes a segment fails on, and let only those leave.

Each node at fault costs a logarithm of builds. Where a segment fails in every part, what is left after 10,000
nodes built leaves with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import fx

from intarsia.graph.plan import Plan
from intarsia.graph.segment import Segment
from intarsia.partition.blocks import too_small
from intarsia.partition.constrain import agree, find_groups
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import Problem, fewest
from intarsia.partition.strategies import Part, write_segments
from intarsia.partition.table import PYTORCH, SupportTable
from intarsia.partition.units import Units, find_recomputable, find_units

T = TypeVar("T")
MOST_BUILT = 10_000  # nodes, in all builds to find those that one segment fails on
_NEARBY = 8  # nodes after a faulty one that are tried first
_CLOSE = 8  # offenders in a row, each that near to the one before, after which no more are looked for


def bisect_failure(
    nodes: Sequence[T],
    fails: Callable[[Sequence[T]], str | None],
    most: int = MOST_BUILT,
    alike: Callable[[T], Sequence[T]] = lambda node: (),
) -> dict[T, str]:
    """The faulty nodes when `nodes` fail to build together, each with the reason.

    `fails(some)` builds a run of neighbours out of `nodes` and gives the reason it failed, or None. The first
    offender is found with at most `log2(len(nodes)) + 2` builds: halving finds the shortest run from the
    start that fails, and its last node is faulty. The search goes on after it with short runs that grow,
    since what fails often fails again nearby. When runs of `most` nodes in all were built, or eight offenders
    are close to each other, it ends, and the remaining nodes count as faulty: a run that fails in so many
    places gains little on its engine.

    Nodes `alike`, such as the attention of every layer, mostly fail together: after a node that fails
    by itself, each of them is built by itself, which costs less than to find it in a run.

    Example:
        >>> bisect_failure([1, 2, 3, 4], lambda some: "three" if 3 in some else None)
        {3: 'three'}
    """
    blamed: dict[T, str] = {}
    start = built = close = 0
    length = len(nodes)
    while start < len(nodes):
        edge = next((i for i in range(start, len(nodes)) if nodes[i] in blamed), len(nodes))
        end = min(start + length, edge)
        reason, built = (fails(nodes[start:end]) if start < end else None), built + end - start
        if reason is None and end == edge:
            start, length = edge + 1, len(nodes)
            continue
        if reason is None:
            length *= 4
            continue
        if (built > most and blamed) or close == _CLOSE:
            return blamed | dict.fromkeys(nodes[start:], reason)
        passes, broken = start, end  # nodes[start:passes] builds, nodes[start:broken] does not
        while broken - passes > 1:
            middle = (passes + broken) // 2
            fault, built = fails(nodes[start:middle]), built + middle - start
            if fault is None:
                passes = middle
            else:
                broken, reason = middle, fault
        offender = nodes[broken - 1]
        blamed[offender] = reason
        twins = [node for node in alike(offender) if node not in blamed]
        if twins and fails([offender]) is not None:
            blamed |= {twin: why for twin in twins if (why := fails([twin])) is not None}
        close = close + 1 if broken - start <= _NEARBY else 0
        start, length = broken, _NEARBY
    return blamed


def repair(
    gm: fx.GraphModule,
    plan: Plan,
    table: SupportTable,
    refusals: Mapping[fx.Node, Mapping[str, str]],
    options: PartitionOptions | None = None,
) -> tuple[Plan, SupportTable] | None:
    """The plan with the refused nodes moved out of their segments, and the table that says why.

    Every other engine segment stays as it is, so what was built for it still serves. None means that a
    view shared by segments was refused, and that the strategy has to be asked again.
    """
    options = options or PartitionOptions()
    groups = find_groups(gm, options.atomic)
    shared = find_recomputable(gm.graph, table)
    if any(node in shared for node in refusals):
        return None
    # What the strategy refused by itself, such as small blocks, stays refused.
    known = {node: why for segment in plan.segments for node, why in segment.reasons.items()}
    table = agree(table.with_refusals(known).with_refusals(refusals), groups)
    units = find_units(gm.graph, table, groups)
    again = frozenset(units.recomputed)
    number = {node: unit for unit, members in enumerate(units.nodes) for node in members}
    parts: list[Part] = []
    for segment in plan.segments:
        nodes = [node for node in segment.nodes if node not in again]
        if all(table.accepts(node, segment.engine) for node in nodes):
            parts.append(Part(segment.engine, nodes, segment.do_not_merge))
            continue
        inside = sorted({number[node] for node in nodes})
        more, table = _split(units, inside, segment, table, options)
        parts.extend(more)
    segments = write_segments(gm.graph, units, _join_pytorch([part for part in parts if part.nodes]), table)
    return Plan(tuple(segments), plan.strategy), table


def _split(
    units: Units, inside: Sequence[int], segment: Segment, table: SupportTable, options: PartitionOptions
) -> tuple[list[Part], SupportTable]:
    """One segment's units again, in as few parts as the refusals allow."""
    rank = {unit: place for place, unit in enumerate(inside)}
    priority = {engine: place for place, engine in enumerate(table.engines)}

    def engine_of(unit: int) -> str:
        node = units.nodes[unit][0]
        return segment.engine if table.accepts(node, segment.engine) else table.choice(node)

    problem = Problem(
        [priority[engine_of(unit)] for unit in inside],
        [[rank[earlier] for earlier in units.before[unit] if earlier in rank] for unit in inside],
    )
    parts: list[Part] = []
    for run in fewest(problem):
        nodes = [node for place in run for node in units.nodes[inside[place]]]
        engine = table.engines[problem.colours[run[0]]]
        exempt = engine == PYTORCH or options.require_full_compilation
        why = None if exempt else too_small(nodes, options.min_block_size)
        if why is not None:
            table = table.with_refusals({node: dict.fromkeys(table.engines[:-1], why) for node in nodes})
            engine = PYTORCH
        parts.append(Part(engine, nodes, segment.do_not_merge))
    return parts, table


def _join_pytorch(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring PyTorch parts as one; engine parts stay as they were built."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and last.engine == part.engine == PYTORCH and not (last.do_not_merge or part.do_not_merge):
            joined[-1] = Part(PYTORCH, [*last.nodes, *part.nodes], False)
        else:
            joined.append(part)
    return joined

"""Repairing a plan: the nodes on which a segment fails are found, and only they leave its engine.

Finding a node takes a logarithmic number of builds. If a segment fails in every part, the search ends after
10,000 built nodes, and the remaining nodes leave, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import fx

from intarsia.graph.nodes import compute_nodes
from intarsia.graph.plan import Plan
from intarsia.graph.segment import Segment
from intarsia.partition.blocks import too_small
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import Problem, fewest
from intarsia.partition.strategies import Part, write_segments
from intarsia.partition.table import PYTORCH, SupportTable, agree, find_groups
from intarsia.partition.units import Units, find_recomputable, find_units

T = TypeVar("T")
MOST_BUILT = 10_000  # nodes, in all builds for one segment
_NEARBY = 8  # nodes after a faulty one that are tried first
_MOST_SEGMENTS = 12  # that are moved one by one, where only the whole is wrong
_CLOSE = 8  # faulty nodes in a row, each near the one before, after which the search ends


def bisect_failure(
    nodes: Sequence[T],
    fails: Callable[[Sequence[T]], str | None],
    most: int = MOST_BUILT,
    alike: Callable[[T], Sequence[T]] = lambda node: (),
) -> dict[T, str]:
    """The faulty nodes if `nodes` fail to build together, each with the reason.

    `fails(some)` builds consecutive nodes and returns the reason for a failure, or None. The first faulty
    node is found with at most `log2(len(nodes)) + 2` builds: halving finds the shortest sequence from the
    start that fails, and its last node is faulty. The search continues after it with short sequences that
    grow, since faulty nodes are often near each other. It ends when `most` nodes in all were built, or when
    eight faulty nodes are close to each other. The remaining nodes then count as faulty: a segment that fails
    in so many places gains little on its engine.

    Nodes that are `alike`, such as the attention of every layer, mostly fail together. After a node that
    fails alone, each of them is built alone, which takes fewer builds than finding it in a sequence. Example:
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
        passes, broken = start, end  # nodes[start:passes] builds, and nodes[start:broken] fails
        while broken - passes > 1:
            middle = (passes + broken) // 2
            fault, built = fails(nodes[start:middle]), built + middle - start
            if fault is None:
                passes = middle
            else:
                broken, reason = middle, fault
        faulty = nodes[broken - 1]
        blamed[faulty] = reason
        twins = [node for node in alike(faulty) if node not in blamed]
        if twins and fails([faulty]) is not None:
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
    """The plan with the refused nodes moved out of their segments, and the table with the reasons.

    Other segments do not change, so their programs can be reused. None means that a view which segments share
    was refused, so that the strategy has to plan again.
    """
    options = options or PartitionOptions()
    groups = find_groups(gm, options.atomic)
    shared = find_recomputable(gm.graph, table)
    if any(node in shared for node in refusals):
        return None
    # Nodes that the strategy moved itself, such as small blocks, stay where they are.
    moved = {node: why for segment in plan.segments for node, why in segment.reasons.items()}
    table = agree(table.with_refusals(moved).with_refusals(refusals), groups)
    units = find_units(gm.graph, table, groups)
    recomputed = frozenset(units.recomputed)
    number = {node: unit for unit, members in enumerate(units.nodes) for node in members}
    parts: list[Part] = []
    for segment in plan.segments:
        nodes = [node for node in segment.nodes if node not in recomputed]
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
    """The units of one segment as the fewest parts that the refusals allow, and the table."""
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
    """The parts, with neighbouring ones on PyTorch joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and last.engine == part.engine == PYTORCH and not (last.do_not_merge or part.do_not_merge):
            joined[-1] = Part(PYTORCH, [*last.nodes, *part.nodes], False)
        else:
            joined.append(part)
    return joined


def suspects(graph: fx.Graph, plan: Plan, fault: str) -> Iterator[tuple[dict[fx.Node, dict[str, str]], str]]:
    """Refusals, each with a note, for a plan whose pieces are correct but whose whole is not.

    First each engine is excluded, if there are several, then each segment.
    """
    ran = [segment for segment in plan.segments if segment.engine != PYTORCH]
    used = list(dict.fromkeys(segment.engine for segment in ran))
    for engine in used if len(used) > 1 else ():
        reason = f"with {engine}, the compiled model {fault}"
        yield {node: {engine: reason} for node in compute_nodes(graph)}, f"{engine} is not used: {reason}"
    for segment in ran[:_MOST_SEGMENTS] if len(ran) > 1 else ():
        reason = f"with {segment.nodes[0].name} and what runs with it on {segment.engine}, the model {fault}"
        yield {node: {segment.engine: reason} for node in segment.nodes}, f"a segment is moved: {reason}"

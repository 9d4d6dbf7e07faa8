"""The strategies, which turn a graph and a support table into a plan, and the steps they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from intarsia.errors import PartitionError, count_text
from intarsia.graph.nodes import is_control_flow, op_name, whereabouts
from intarsia.graph.plan import Plan
from intarsia.graph.segment import Segment, readers_of
from intarsia.partition.blocks import split_by_weight, too_heavy, too_small
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import Problem, Runs, fewest, in_order, merge
from intarsia.partition.table import PYTORCH, SupportTable, agree, constrain, find_groups
from intarsia.partition.units import Units, find_units

Strategy: TypeAlias = Callable[[fx.GraphModule, SupportTable, PartitionOptions], Plan]


def greedy(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions | None = None) -> Plan:
    """One segment for each sequence of nodes, in graph order, that go to the same engine.

    This is predictable, but often far from the fewest segments. `dependency` reorders nodes to have fewer.

    Example:
        >>> import torch
        >>> gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> tanh = list(gm.graph.nodes)[2]
        >>> table = SupportTable(("mine", "pytorch"), {tanh: {"mine": "no converter"}})
        >>> greedy(gm, table, PartitionOptions(min_block_size=1)).engines
        ('mine', 'pytorch')
    """
    return assemble(gm, table, options or PartitionOptions(), in_order, "greedy")


def dependency(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions | None = None) -> Plan:
    """Each node goes to its first engine; nodes are reordered so that there are few segments.

    For two engines the number of segments is minimal. For more, it is at most that of one pass that keeps one
    segment of every engine open.

    Example:
        >>> import torch
        >>> gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> tanh = list(gm.graph.nodes)[2]
        >>> table = SupportTable(("mine", "pytorch"), {tanh: {"mine": "no converter"}})
        >>> dependency(gm, table, PartitionOptions(min_block_size=1)).engines
        ('mine', 'pytorch')
    """
    return assemble(gm, table, options or PartitionOptions(), fewest, "dependency")


def hierarchical(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions | None = None) -> Plan:
    """Each node goes to the engine of highest priority that takes it.

    The priority is that of the table or of `options.backend_priority`. `options.backend_support_map` limits
    each engine to some operators. A block that is too small for one engine goes to the next.

    Example:
        >>> import torch
        >>> gm = fx.symbolic_trace(lambda x: torch.tanh(torch.relu(x)))
        >>> options = PartitionOptions(
        ...     min_block_size=1,
        ...     backend_priority=("a", "b"),
        ...     backend_support_map={"a": (torch.relu,), "b": (torch.tanh,)},
        ... )
        >>> hierarchical(gm, SupportTable(("b", "a", "pytorch")), options).engines
        ('a', 'b')
    """
    return assemble(gm, table, options or PartitionOptions(), fewest, "hierarchical")


STRATEGIES: dict[str, Strategy] = {
    "greedy": greedy,
    "dependency": dependency,
    "hierarchical": hierarchical,
}


def find_strategy(partition: str | Strategy) -> Strategy:
    """The strategy of that name, or the function itself."""
    if not isinstance(partition, str):
        if not callable(partition) or isinstance(partition, type):
            raise PartitionError(
                f"partition={partition!r} is not a strategy that makes a plan without measuring"
            )
        return partition
    if partition not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise PartitionError(f"there is no partition strategy {partition!r}; known are {known}")
    return STRATEGIES[partition]


Order = Callable[[Problem], Runs]
_ROUNDS = 8


@dataclass(frozen=True)
class Part:
    """A segment before its recomputed nodes and reasons are added."""

    engine: str
    nodes: Sequence[fx.Node]
    do_not_merge: bool = False


def assemble(
    gm: fx.GraphModule, table: SupportTable, options: PartitionOptions, order: Order, strategy: str
) -> Plan:
    """The plan of a strategy: constrain the table, order the units, move small blocks, split heavy ones."""
    table = constrain(gm, table, options)
    groups = find_groups(gm, options.atomic)
    table = agree(table, groups)
    units = find_units(gm.graph, table, groups)
    table = _within_budget(units, table, options)
    runs, table = _worthwhile(units, table, options, order)
    full = options.require_full_compilation
    parts = _parts(units, runs, table, options)
    segments = write_segments(gm.graph, units, parts, table, full=full)
    if full:
        require_full(segments)
    return Plan(tuple(segments), strategy)


def require_full(segments: Sequence[Segment]) -> None:
    """Raise an error that lists every node in PyTorch, if there is one.

    Control flow does not count: PyTorch runs it, and its bodies are compiled on their own.
    """
    lines = []
    for segment in segments:
        if segment.engine != PYTORCH:
            continue
        for node in segment.nodes:
            if is_control_flow(node):
                continue
            reasons = segment.reasons.get(node, {})
            why = (
                "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
                or "no engine was given"
            )
            lines.append(f"  {op_name(node)} ({whereabouts(node)}): {why}")
    if lines:
        count = count_text(len(lines), "node")
        raise PartitionError(
            f"require_full_compilation: {count} cannot run on an engine\n" + "\n".join(lines)
        )


def _within_budget(units: Units, table: SupportTable, options: PartitionOptions) -> SupportTable:
    refused: dict[fx.Node, dict[str, str]] = {}
    for members in units.nodes if options.memory_budget else ():
        for engine in table.engines:
            if reason := too_heavy(members, engine, options.memory_budget):
                for node in members:
                    refused.setdefault(node, {})[engine] = reason
    return table.with_refusals(refused) if refused else table


def _worthwhile(
    units: Units, table: SupportTable, options: PartitionOptions, order: Order
) -> tuple[Runs, SupportTable]:
    """The runs in order, and the table with a refusal for each block that is too small for its engine."""
    least = 1 if options.require_full_compilation else options.min_block_size
    for _ in range(_ROUNDS):
        runs = order(units.problem(table))
        small = _small(units, runs, table, least)
        if not small:
            return runs, table
        refused = {n: {table.choice(n): why} for run, why in small for u in run for n in units.nodes[u]}
        table = table.with_refusals(refused)
    # Further rounds may never settle. Sending the rest to PyTorch, and joining neighbours, always does.
    small = _small(units, runs, table, least)
    everywhere = [engine for engine in table.engines if engine != PYTORCH]
    refused = {n: dict.fromkeys(everywhere, why) for run, why in small for u in run for n in units.nodes[u]}
    table = table.with_refusals(refused)
    return merge(units.problem(table), runs), table


def _small(units: Units, runs: Runs, table: SupportTable, least: int | None) -> list[tuple[list[int], str]]:
    small = []
    for run in runs:
        first = units.nodes[run[0]][0]
        if least == 1 or table.choice(first) == PYTORCH or is_control_flow(first):
            continue
        if why := too_small([node for unit in run for node in units.nodes[unit]], least):
            small.append((run, why))
    return small


def _parts(units: Units, runs: Runs, table: SupportTable, options: PartitionOptions) -> list[Part]:
    """The runs as parts, split where their weights exceed the engine's budget."""
    parts: list[Part] = []
    for run in runs:
        members = [units.nodes[unit] for unit in run]
        first = members[0][0]
        engine = table.choice(first)
        budget = options.memory_budget.get(engine)
        split = [members] if budget is None else split_by_weight(members, budget)
        for part in split:
            nodes = [node for unit in part for node in unit]
            parts.append(Part(engine, nodes, is_control_flow(first) or len(split) > 1))
    return parts


def write_segments(
    graph: fx.Graph, units: Units, parts: Sequence[Part], table: SupportTable, *, full: bool = False
) -> list[Segment]:
    """The parts as segments, with their recomputed nodes and reasons, and nodes in graph order.

    Recomputed nodes that no part reads run in PyTorch or, with `full`, on the first engine.
    """
    position = {node: place for place, node in enumerate(graph.nodes)}
    placed, views = _place_recomputed(graph, units, parts, table.engines[0] if full else PYTORCH)
    return [
        Segment(
            part.engine,
            tuple(sorted(part.nodes, key=position.__getitem__)),
            part.do_not_merge,
            {node: why for node in part.nodes if (why := table.reasons(node, part.engine))},
            tuple(sorted(views.get(number, ()), key=position.__getitem__)),
        )
        for number, part in enumerate(placed)
    ]


def _place_recomputed(
    graph: fx.Graph, units: Units, parts: Sequence[Part], otherwise: str
) -> tuple[list[Part], dict[int, list[fx.Node]]]:
    """Put every recomputed node into the first part that reads it; the other readers recompute it."""
    if not units.recomputed:
        return list(parts), {}
    home = {node: number for number, part in enumerate(parts) for node in part.nodes}
    readers = readers_of(graph, dict.fromkeys(units.recomputed), home)
    stands_alone = [is_control_flow(part.nodes[0]) for part in parts]
    anywhere = [number for number, alone in enumerate(stands_alone) if not alone]
    in_pytorch = [number for number in anywhere if parts[number].engine == PYTORCH]
    nodes = [list(part.nodes) for part in parts]
    views: dict[int, list[fx.Node]] = {}
    homeless: list[fx.Node] = []
    for node in units.recomputed:
        wanted = sorted(number for number in readers[node] if not stands_alone[number])
        places = wanted or in_pytorch or anywhere
        (nodes[places[0]] if places else homeless).append(node)
        for number in readers[node]:
            if not places or number != places[0]:
                views.setdefault(number, []).append(node)
    placed = [replace(part, nodes=own) for part, own in zip(parts, nodes, strict=True)]
    return placed + ([Part(otherwise, homeless)] if homeless else []), views

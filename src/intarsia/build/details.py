"""The details of a drawing: layers before and after rewriting, work of nodes, and advice.

Advice names the operator that would leave the fewest segments if an engine supported it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from intarsia.convert import NodeError, convert
from intarsia.drawing import DrawnLayers
from intarsia.engines import Engine, NetworkEngine
from intarsia.errors import count_text
from intarsia.graph.nodes import op_name
from intarsia.graph.plan_text import PlanDetails
from intarsia.partition import PartitionOptions, Piece, Plan, Segment, Strategy, extract
from intarsia.partition.blocks import work
from intarsia.partition.support import support_table
from intarsia.partition.table import PYTORCH, SupportTable, constrain
from intarsia.rewrite import Patterns, apply, patterns_by_engine


def plan_details(
    module: fx.GraphModule,
    engines: Sequence[Engine],
    strategy: Strategy,
    options: PartitionOptions,
    patterns: Patterns,
    segments: Sequence[Segment],
) -> PlanDetails:
    """The details of a plan. Every segment is converted and rewritten, and nothing is built.

    Compiled modules do not store their networks, so this is done when a plan is drawn.
    """
    plan = Plan(tuple(segments))
    by_name = {engine.name: engine for engine in engines if isinstance(engine, NetworkEngine)}
    chosen = patterns_by_engine(patterns, list(by_name.values()))
    layers = {
        number: _layers(piece, by_name[piece.segment.engine], chosen[piece.segment.engine])
        for number, piece in enumerate(extract(module, plan)[: len(plan)])
        if piece.segment.engine in by_name
    }
    table = constrain(module, support_table(module, engines), options)
    advice = tuple(map(str, advise(module, table, strategy, options)))
    return PlanDetails(advice, layers, {node: work(node) for node in plan.nodes})


def _layers(piece: Piece, engine: NetworkEngine, patterns: Patterns) -> DrawnLayers:
    try:
        net = convert(piece.module, name=engine.name, engine=engine)
    except NodeError as error:  # a converter was removed since the compile
        return DrawnLayers(f"not converted: {error}", "")
    converted = str(net)
    log = apply(net, engine=engine, patterns=patterns, measure=False)
    return DrawnLayers(converted, str(net), tuple(map(str, log.fired)))


@dataclass(frozen=True)
class Advice:
    """The effect if `engine` supported `op`: the number of nodes, and of segments before and after."""

    op: str
    engine: str
    nodes: int
    before: int
    after: int

    def __str__(self) -> str:
        times = count_text(self.nodes, "node")
        return f"if {self.engine} took {self.op} ({times}), {self.before} segments would become {self.after}"


def advise(
    gm: fx.GraphModule,
    table: SupportTable,
    strategy: Callable[[fx.GraphModule, SupportTable, PartitionOptions], Plan],
    options: PartitionOptions | None = None,
) -> list[Advice]:
    """Every operator and engine with fewer segments if the engine supported it, the fewest first.

    Operators that the user's options keep in PyTorch do not count. With `require_full_compilation`, nothing
    is left to PyTorch, so there is no advice. Example:
        >>> from intarsia.partition import dependency
        >>> import torch
        >>> gm = fx.symbolic_trace(lambda x: torch.relu(torch.lgamma(torch.relu(x))))
        >>> lgamma = list(gm.graph.nodes)[2]
        >>> table = SupportTable(("mine", "pytorch"), {lgamma: {"mine": "no converter"}})
        >>> print(advise(gm, table, dependency, PartitionOptions(min_block_size=1))[0])
        if mine took lgamma (1 node), 3 segments would become 1
    """
    options = options or PartitionOptions()
    if options.require_full_compilation:
        return []
    plan = strategy(gm, table, options)
    left = {node for segment in plan.segments if segment.engine == PYTORCH for node in segment.nodes}
    refused: dict[tuple[str, str], list[fx.Node]] = {}
    for node, reasons in table.refusals.items():
        for engine in reasons if node in left else ():
            refused.setdefault((op_name(node), engine), []).append(node)
    suggestions: list[Advice] = []
    for (op, engine), nodes in refused.items():
        after = len(strategy(gm, _lifted(table, nodes, engine), options))
        if after < len(plan):
            suggestions.append(Advice(op, engine, len(nodes), len(plan), after))
    return sorted(
        suggestions, key=lambda advice: (advice.after, table.engines.index(advice.engine), advice.op)
    )


def _lifted(table: SupportTable, nodes: list[fx.Node], engine: str) -> SupportTable:
    refusals = dict(table.refusals)
    for node in nodes:
        refusals[node] = {name: reason for name, reason in refusals[node].items() if name != engine}
    return SupportTable(table.engines, refusals)

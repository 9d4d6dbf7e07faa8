"""What a drawing of a plan shows besides the plan: layers before and after rewriting, work, and advice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from intarsia.convert import NodeError, convert
from intarsia.drawing import DrawnLayers
from intarsia.engines import Engine, NetworkEngine
from intarsia.graph.plan_text import PlanDetails
from intarsia.partition import PartitionOptions, Piece, Plan, Segment, Strategy, extract
from intarsia.partition.advice import advise
from intarsia.partition.blocks import work
from intarsia.partition.constrain import constrain
from intarsia.partition.support import support_table
from intarsia.rewrite import Patterns, apply, patterns_by_engine


def plan_details(
    module: fx.GraphModule,
    engines: Sequence[Engine],
    strategy: Strategy,
    options: PartitionOptions,
    patterns: Patterns,
    segments: Sequence[Segment],
) -> PlanDetails:
    """Convert and rewrite every segment, and find what an engine would have to take; nothing is built.

    Compiled modules do not keep their networks, so this is done when somebody asks for a report.
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
    except NodeError as error:  # a converter that was taken back since the compile
        return DrawnLayers(f"not converted: {error}", "")
    converted = str(net)
    log = apply(net, engine=engine, patterns=patterns, measure=False)
    return DrawnLayers(converted, str(net), tuple(map(str, log.fired)))

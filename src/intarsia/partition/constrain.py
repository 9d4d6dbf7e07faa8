"""The user's choices, written into the support table as refusals with reasons."""

from __future__ import annotations

from torch import fx

from intarsia.capture.annotate import wanted_engine
from intarsia.errors import PartitionError
from intarsia.graph.nodes import compute_nodes, op_name
from intarsia.partition.names import module_matcher, op_matcher
from intarsia.partition.options import PartitionOptions
from intarsia.partition.table import PYTORCH, SupportTable


def constrain(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions) -> SupportTable:
    """A table in the order of `backend_priority` that also refuses what the user does not want.

    Those are ops and modules kept in PyTorch, what `backend_support_map` does not give to an engine, and
    engines other than the one `run_on` asks for. Constraining twice changes nothing.
    """
    table = _prioritise(gm, table, options)
    refused: dict[fx.Node, dict[str, str]] = {}
    others = [engine for engine in table.engines if engine != PYTORCH]
    by_op = [(name, op_matcher(name)) for name in options.torch_executed_ops]
    by_module = [module_matcher(name) for name in options.torch_executed_modules]
    for node in compute_nodes(gm.graph):
        reasons: dict[str, str] = {}
        for _, matches in by_op:
            if matches(node):
                reasons = dict.fromkeys(others, f"torch_executed_ops names {op_name(node)}")
        for find in by_module:
            if path := find(node):
                reasons = dict.fromkeys(others, f"torch_executed_modules names {path}")
        wanted = wanted_engine(node)
        if wanted is not None:
            if wanted not in table.engines:
                raise PartitionError(
                    f"run_on({wanted!r}) around {node.name} names none of {list(table.engines)}"
                )
            reasons = {e: f"run_on({wanted!r}) asks for {wanted}" for e in others if e != wanted} | reasons
        if reasons:
            refused[node] = reasons
    return table.with_refusals(refused) if refused else table


def _prioritise(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions) -> SupportTable:
    """A table over `backend_priority`, where each engine takes only what `backend_support_map` gives it."""
    engines = tuple(options.backend_priority or table.engines)
    unknown = [engine for engine in engines if engine not in table.engines]
    if unknown:
        raise PartitionError(
            f"backend_priority names {unknown[0]!r}, but the engines are {list(table.engines)}"
        )
    table = table.with_engines((*(engine for engine in engines if engine != PYTORCH), PYTORCH))
    if options.backend_support_map is None:
        return table
    matchers = {e: [op_matcher(name) for name in names] for e, names in options.backend_support_map.items()}
    refused: dict[fx.Node, dict[str, str]] = {}
    for node in compute_nodes(gm.graph):
        for engine in table.engines:
            if engine != PYTORCH and not any(matches(node) for matches in matchers.get(engine, ())):
                reason = f"backend_support_map does not give {op_name(node)} to {engine}"
                refused.setdefault(node, {})[engine] = reason
    return table.with_refusals(refused)

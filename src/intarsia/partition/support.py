"""Who can run what: every node asked of every engine, by conversion and by the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from intarsia.convert.dryrun import Signature, dry_convert, signature_of
from intarsia.convert.interpreter import constant_of
from intarsia.convert.registry import registry
from intarsia.engines import Engine, GraphEngine, NetworkEngine
from intarsia.engines.time_limit import OutOfTime, within
from intarsia.graph.nodes import is_compute, is_control_flow
from intarsia.partition.table import PYTORCH, SupportTable

# What an engine said of a signature; it depends on nothing else but the converters' version.
_answers: dict[tuple[str, int, Signature], str | None] = {}


def support_table(
    module: fx.GraphModule, engines: Sequence[Engine], limit_s: float | None = None
) -> SupportTable:
    """Ask every engine about every node; the table holds each refusal with its reason.

    An engine that takes longer than `limit_s` seconds to answer is not asked again, and refuses every node.
    """
    constants = {node: constant_of(module, node) for node in module.graph.nodes if node.op == "get_attr"}
    askable = [engine for engine in engines if engine.name != PYTORCH]
    refusals: dict[fx.Node, dict[str, str]] = {}
    lost: dict[str, str] = {}
    nodes = [node for node in module.graph.nodes if is_compute(node)]
    for node in nodes:
        asked = [engine for engine in askable if engine.name not in lost]
        reasons = refusals_of(node, constants, asked, limit_s, lost)
        if reasons:
            refusals[node] = reasons
    for node in nodes if lost else ():
        refusals[node] = refusals.get(node, {}) | lost
    return SupportTable(tuple(engine.name for engine in engines), refusals)


def refused_table(module: fx.GraphModule, engines: Sequence[str], reason: str) -> SupportTable:
    """The table by which PyTorch, the last of the engines, runs everything, for one reason."""
    refused = dict.fromkeys(engines[:-1], reason)
    return SupportTable(tuple(engines), {n: refused for n in module.graph.nodes if is_compute(n)})


def refusals_of(
    node: fx.Node,
    constants: dict[fx.Node, Any],
    engines: Sequence[Engine],
    limit_s: float | None = None,
    lost: dict[str, str] | None = None,
) -> dict[str, str]:
    """The engines that do not take a node, each with its reason; who does not come back goes into `lost`."""
    if is_control_flow(node):
        return {engine.name: "control flow runs in PyTorch, its bodies on engines" for engine in engines}
    signature: Signature | None = None
    reasons: dict[str, str] = {}
    for engine in engines:
        try:
            if isinstance(engine, NetworkEngine):
                signature = signature or signature_of(node, constants)
                reason = _ask(engine, node, constants, signature, limit_s)
            else:
                reason = _ask_graph_engine(engine, node, limit_s)
        except OutOfTime as error:
            reason = str(error)
            if lost is not None:
                lost[engine.name] = reason
        if reason is not None:
            reasons[engine.name] = reason
    return reasons


def _ask(
    engine: NetworkEngine,
    node: fx.Node,
    constants: dict[fx.Node, Any],
    signature: Signature,
    limit_s: float | None,
) -> str | None:
    device = _foreign_device(node, engine)
    if device is not None:
        return f"it runs on {device}, where {engine.name} does not"
    key = (engine.key(), registry.version, signature)
    if key not in _answers:
        tried = dry_convert(node, constants, signature)
        try:
            _answers[key] = (
                tried
                if isinstance(tried, str)
                else within(limit_s, f"{engine.name}.probe", lambda: engine.probe(tried))
            )
        except OutOfTime:
            raise
        except Exception as error:  # not kept: the next time it may go better
            return f"{engine.name} failed when asked: {type(error).__name__}: {error}"
    return _answers[key]


def _ask_graph_engine(engine: Engine, node: fx.Node, limit_s: float | None) -> str | None:
    device = _foreign_device(node, engine)
    if device is not None:
        return f"it runs on {device}, where {engine.name} does not"
    if not isinstance(engine, GraphEngine):
        return None
    try:
        return within(limit_s, f"{engine.name}.refusal", lambda: engine.refusal(node))
    except OutOfTime:
        raise
    except Exception as error:
        return f"{engine.name} failed when asked: {type(error).__name__}: {error}"


def _foreign_device(node: fx.Node, engine: Engine) -> str | None:
    value: Any = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, torch.Tensor) and not engine.runs_on(first.device.type):
        return str(first.device)
    return None

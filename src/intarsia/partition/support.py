"""The support table: every engine is asked about every node, by conversion and by a probe of the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from intarsia.convert.interpreter import Signature, constant_of, dry_convert, signature_of
from intarsia.convert.registry import registry
from intarsia.engines import Engine, GraphEngine, NetworkEngine
from intarsia.engines.building import OutOfTime, within
from intarsia.graph.nodes import is_compute, is_control_flow
from intarsia.network import Network
from intarsia.partition.table import PYTORCH, SupportTable
from intarsia.quantized import INTEGER_LINEAR

# The answers of engines by signature. They depend on nothing else but the registered converters.
_Question = tuple[str, int, Signature]
_answers: dict[_Question, str | None] = {}

aten = torch.ops.aten
_QUOTIENTS = frozenset({aten.div, aten.true_divide})
_ROUNDS = frozenset(
    {
        *(aten.floor, aten.ceil, aten.round, aten.trunc, aten.fix, aten.frac, aten.fmod, aten.remainder),
        aten.floor_divide,
        INTEGER_LINEAR.overloadpacket,
    }
)
# Operators that move a quotient to where it is rounded, or compute with it without rounding it.
_PASS_ON = frozenset(
    {
        *(aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.abs, aten.clamp),
        *(aten.reciprocal, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum, aten.where, aten.cat),
        *(aten.view, aten.reshape, aten.transpose, aten.permute, aten.expand, aten.slice, aten.select),
        *(aten.squeeze, aten.unsqueeze, aten.clone, aten.flatten, aten._to_copy, aten.to),
    }
)
_STEPS_TO_ROUNDING = 8  # operators between a quotient and its rounding; torchao has six


def support_table(
    module: fx.GraphModule, engines: Sequence[Engine], limit_s: float | None = None
) -> SupportTable:
    """The refusal of each node by each engine, with its reason.

    An engine that takes longer than `limit_s` seconds to answer is not asked again and refuses every node.
    """
    constants = {node: constant_of(module, node) for node in module.graph.nodes if node.op == "get_attr"}
    askable = [engine for engine in engines if engine.name != PYTORCH]
    refusals: dict[fx.Node, dict[str, str]] = {}
    lost: dict[str, str] = {}
    nodes = [node for node in module.graph.nodes if is_compute(node)]
    of_networks = [engine for engine in askable if isinstance(engine, NetworkEngine)]
    described = [node for node in nodes if any(_may_take(engine, node) for engine in of_networks)]
    signatures = {node: signature_of(node, constants) for node in described}
    for engine in of_networks:
        of_engine = {node: signature for node, signature in signatures.items() if _may_take(engine, node)}
        _ask_together(engine, of_engine, constants, limit_s, lost)
    for node in nodes:
        remaining = [engine for engine in askable if engine.name not in lost]
        reasons = _refusals_of(node, signatures.get(node), constants, remaining, limit_s, lost)
        if reasons:
            refusals[node] = reasons
    for engine in of_networks:
        for node in () if engine.divides_exactly else rounded_quotients(module.graph):
            reason = f"its result is rounded to an integer later, and {engine.name} does not divide exactly"
            refusals.setdefault(node, {}).setdefault(engine.name, reason)
    for node in nodes if lost else ():
        refusals[node] = refusals.get(node, {}) | lost
    return SupportTable(tuple(engine.name for engine in engines), refusals)


def rounded_quotients(graph: fx.Graph) -> Iterator[fx.Node]:
    """Divisions of floats whose result is rounded to an integer later.

    A quotient whose last bit differs can round to another integer: an engine that multiplies 41 by the
    reciprocal of 41 gets less than 1, whose floor is 0. Divisions by powers of two are always exact.
    """
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) not in _QUOTIENTS or "rounding_mode" in node.kwargs:
            continue
        value, divisor = node.meta.get("val"), node.args[1]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if isinstance(divisor, int | float) and divisor and abs(math.frexp(divisor)[0]) == 0.5:
            continue
        if _is_rounded(node, _STEPS_TO_ROUNDING):
            yield node


def _is_rounded(node: fx.Node, steps: int) -> bool:
    for user in node.users:
        packet, value = getattr(user.target, "overloadpacket", None), user.meta.get("val")
        if packet in _ROUNDS:
            return True
        if packet in _PASS_ON and isinstance(value, torch.Tensor):
            if not value.is_floating_point() and value.dtype is not torch.bool:
                return True  # a cast to integers
            if value.is_floating_point() and steps and _is_rounded(user, steps - 1):
                return True
    return False


def refused_table(module: fx.GraphModule, engines: Sequence[str], reason: str) -> SupportTable:
    """The table in which PyTorch, the last engine, runs every node for one reason."""
    refused = dict.fromkeys(engines[:-1], reason)
    return SupportTable(tuple(engines), {n: refused for n in module.graph.nodes if is_compute(n)})


def _refusals_of(
    node: fx.Node,
    signature: Signature | None,
    constants: dict[fx.Node, Any],
    engines: Sequence[Engine],
    limit_s: float | None,
    lost: dict[str, str],
) -> dict[str, str]:
    """The reasons of the engines that refuse a node. Engines that take too long are added to `lost`."""
    reasons: dict[str, str] = {}
    for engine in engines:
        if not _may_take(engine, node):
            reasons[engine.name] = "control flow runs in PyTorch; its bodies run on engines"
            continue
        try:
            reason = _answer(engine, node, constants, signature, limit_s)
        except OutOfTime as error:
            reason = lost[engine.name] = str(error)
        if reason is not None:
            reasons[engine.name] = reason
    return reasons


def _may_take(engine: Engine, node: fx.Node) -> bool:
    """Whether an engine is asked about a node. For control flow, its layers must be able to hold bodies."""
    if not is_control_flow(node):
        return True
    return isinstance(engine, NetworkEngine) and engine.takes_bodies and node.target in registry


def _ask_together(
    engine: NetworkEngine,
    signatures: Mapping[fx.Node, Signature],
    constants: dict[fx.Node, Any],
    limit_s: float | None,
    lost: dict[str, str],
) -> None:
    """Ask an engine about all new signatures at once. An engine that does not answer in time is `lost`."""
    tried: dict[_Question, Network] = {}
    for node, signature in signatures.items():
        key = _question(engine, signature)
        if key in _answers or key in tried or _foreign_device(node, engine) is not None:
            continue
        dry_run = dry_convert(node, constants, signature, engine)
        if isinstance(dry_run, str):
            _answers[key] = dry_run
        else:
            tried[key] = dry_run
    try:
        reasons = within(limit_s, f"{engine.name}.probe", lambda: engine.probe_all(list(tried.values())))
    except OutOfTime as error:
        lost[engine.name] = str(error)
    except Exception:  # `_answer` asks about the nodes one by one, and reports the one that fails
        return
    else:
        _answers.update(zip(tried, reasons, strict=True))


def _answer(
    engine: Engine,
    node: fx.Node,
    constants: dict[fx.Node, Any],
    signature: Signature | None,
    limit_s: float | None,
) -> str | None:
    """Why an engine refuses a node; None if it takes it."""
    device = _foreign_device(node, engine)
    if device is not None:
        return f"it runs on {device}, where {engine.name} does not"
    key: _Question | None = None
    if isinstance(engine, NetworkEngine) and signature is not None:
        key = _question(engine, signature)
        if key in _answers:
            return _answers[key]
        net = dry_convert(node, constants, signature, engine)
        if isinstance(net, str):
            _answers[key] = net
            return net
        method, ask = "probe", partial(engine.probe, net)
    elif isinstance(engine, GraphEngine):
        method, ask = "refusal", partial(engine.refusal, node)
    else:
        return None
    try:
        reason = within(limit_s, f"{engine.name}.{method}", ask)
    except OutOfTime:
        raise
    except Exception as error:  # not remembered, since the next attempt may succeed
        return f"{engine.name} failed when asked: {type(error).__name__}: {error}"
    if key is not None:
        _answers[key] = reason
    return reason


def _question(engine: Engine, signature: Signature) -> _Question:
    return f"{engine.key()} {engine.version()}", registry.version, signature


def _foreign_device(node: fx.Node, engine: Engine) -> str | None:
    value: Any = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, torch.Tensor) and not engine.runs_on(first.device.type):
        return str(first.device)
    return None

"""Graphs as rewrites get them, and what a rewrite makes of one."""

from __future__ import annotations

import torch
from torch import fx, nn

from intarsia.convert import registry
from intarsia.engines.graph_rewrites import apply_rewrites
from intarsia.lower.model import lower_model


def lowered(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    made, _ = lower_model(
        model.eval(), (x,), {}, None, has_converter=registry.__contains__, drop_guards=False
    )
    return made.module


def targets(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def applied(model: nn.Module, x: torch.Tensor, name: str) -> tuple[int, fx.GraphModule]:
    """How often a rewrite applies to a model, and the module after it; its answers are compared."""
    module = lowered(model, x)
    with torch.no_grad():
        expected = module(x)
        count = apply_rewrites(module, [name])[name]
        for answer, truth in zip(module(x), expected, strict=True):
            torch.testing.assert_close(answer, truth, rtol=1e-5, atol=1e-5)
    return count, module

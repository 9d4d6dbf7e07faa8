"""What draws random numbers, and what only might have."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from intarsia.graph.nodes import is_ordered
from intarsia.lower.purity import draws

aten = torch.ops.aten
attention = aten.scaled_dot_product_attention.default


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "drawn"),
    [
        (attention, (), {}, False),
        (attention, (None, 0.0), {}, False),
        (attention, (None, 0.1), {}, True),
        (attention, (), {"dropout_p": 0.1}, True),
        (aten.dropout.default, (0.5, False), {}, False),
        (aten.dropout.default, (0.5, True), {}, True),
        (aten.rrelu.default, (), {}, False),
        (aten.rrelu.default, (0.1, 0.3, True), {}, True),
        (aten.rand_like.default, (), {}, True),
        (aten.bernoulli.p, (0.0,), {}, True),
        (aten.relu.default, (), {}, False),
    ],
)
def test_draws(target: object, args: tuple[object, ...], kwargs: dict[str, object], drawn: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = (x, x, x) if target is attention else (x,)
    node = graph.call_function(target, (*first, *args), kwargs)  # type: ignore[arg-type]
    assert draws(node) is drawn
    assert is_ordered(node) is drawn

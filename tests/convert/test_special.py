"""Error and gamma functions keep float32's digits everywhere, not only where samples lie."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.convert import drivers
from tests.convert.one_node import answers, answers_of_both, network_of

from intarsia.convert.interpreter import NodeError

aten = torch.ops.aten
EDGES = torch.tensor(
    [math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, -2.0, 1.0, 2.0, 3.0, 1e30, -1e30, 3e38, -3e38]
)
GRID = torch.cat([torch.linspace(-11, 11, 20001), torch.logspace(-20, 20, 401), -torch.logspace(-20, 0, 201)])


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("target", [aten.erfc.default, aten.lgamma.default, aten.digamma.default])
def test_edges(target: Any, engine: str) -> None:
    have, want = answers_of_both(target, EDGES, engine=engine)
    torch.testing.assert_close(have, want, equal_nan=True)


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("target", [aten.lgamma.default, aten.digamma.default])
def test_everywhere(target: Any, engine: str) -> None:
    have, _ = answers(target, GRID, engine=engine)
    torch.testing.assert_close(have.double(), target(GRID.double()), rtol=1.3e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("engine", drivers.ENGINES)
def test_the_tail_of_erfc_has_digits(engine: str) -> None:
    tail = torch.linspace(0, 9, 20001)  # down to 4e-37
    have, _ = answers(aten.erfc.default, tail, engine=engine)
    torch.testing.assert_close(have.double(), torch.erfc(tail.double()), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("target", [aten.erfc.default, aten.lgamma.default, aten.digamma.default])
def test_double_is_refused(target: Any) -> None:
    with pytest.raises(NodeError, match=r"DOUBLE is not handled: the formula has float32's digits"):
        network_of(target, torch.ones(2, dtype=torch.float64))

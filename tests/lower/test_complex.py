"""Complex arithmetic becomes real arithmetic that engines take, and the same numbers come out."""

from __future__ import annotations

import pytest
import torch
from tests.functions import Function
from torch import nn
from torch.export import export

import intarsia
from intarsia.convert import registry
from intarsia.lower import lower
from intarsia.lower.complex import is_complex

G = torch.Generator().manual_seed(0)
X, Y = (torch.randn(2, 3, 4, 2, generator=G) for _ in range(2))
REAL = torch.randn(3, 4, generator=G)
FREQUENCIES = torch.polar(torch.ones(3, 4), torch.randn(3, 4, generator=G))


def c(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x)


def r(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x)


CASES = {
    "rotary": lambda x, y: r(c(x) * FREQUENCIES).flatten(2),
    "product": lambda x, y: r(c(x) * c(y)),
    "product by a real": lambda x, y: r(c(x) * REAL),
    "product by a number": lambda x, y: r(c(x) * 2.5),
    "product by a complex number": lambda x, y: r(c(x) * (1 + 2j)),
    "sum": lambda x, y: r(c(x) + c(y) + REAL + 1.5),
    "difference": lambda x, y: r(1.5 - (c(x) - torch.mul(c(y), 2))),
    "quotient": lambda x, y: r(c(x) / c(y)),
    "quotient by a real": lambda x, y: r(c(x) / REAL),
    "reciprocal": lambda x, y: r(1 / c(x)),
    "negation": lambda x, y: r(-c(x)),
    "conjugate": lambda x, y: r((c(x) * c(y).conj()).resolve_conj()),
    "real and imaginary": lambda x, y: (c(x) * c(y)).real + (c(x) * c(y)).imag,
    "size": lambda x, y: (c(x) * c(y)).abs(),
    "angle": lambda x, y: (c(x) * c(y)).angle(),
    "exponential": lambda x, y: r(torch.exp(c(x))),
    "from parts": lambda x, y: r(torch.complex(x[..., 0], y[..., 1]) * c(y)),
    "from polar": lambda x, y: r(torch.polar(x[..., 0].abs(), y[..., 1]) * c(y)),
    "moved": lambda x, y: r((c(x).transpose(1, 2).reshape(2, 12).unsqueeze(0) * 2)[:, 1, 2:].permute(1, 0)),
    "joined": lambda x, y: r(torch.cat([c(x), c(y)], 1).sum(1)),
    "matrix product": lambda x, y: r(c(x) @ c(y).transpose(1, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_complex_arithmetic_is_spelled_out(name: str) -> None:
    model = Function(CASES[name])
    lowered = lower(export(model, (X, Y), strict=False), registry.__contains__)
    complex_nodes = [n for n in lowered.module.graph.nodes if is_complex(n.meta.get("val"))]
    assert all(n.op == "get_attr" for n in complex_nodes), complex_nodes
    results = lowered.module(X, Y)
    result = results[0] if isinstance(results, list | tuple) else results
    torch.testing.assert_close(result, model(X, Y))


def test_a_lazy_conjugate_is_computed() -> None:
    """`view_as_real`, which the graph calls for every complex input, refuses it."""
    model = Function(lambda x: (x * (1 + 2j)).real + x.abs())
    x = torch.view_as_complex(X).clone()
    for example in (x, x.conj()):
        fast = intarsia.compile(model, (example,))
        for call in (example, x, x.conj()):
            torch.testing.assert_close(fast(call), model(call))


def test_complex_inputs_and_outputs_stay_complex() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x + 1

    model = Model()
    x = torch.view_as_complex(X).clone()
    lowered = lower(export(model, (x,), strict=False), registry.__contains__)
    kinds = [str(n.target) for n in lowered.module.graph.nodes if n.op == "call_function"]
    assert kinds[0] == "aten.view_as_real.default"
    assert kinds[-1] == "aten.view_as_complex.default"
    results = lowered.module(x)
    torch.testing.assert_close(results[0] if isinstance(results, list | tuple) else results, model(x))

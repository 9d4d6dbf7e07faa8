"""An answer agrees within what rounding can do, element by element: no larger value excuses a smaller one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from intarsia.compare import disagreement, relative_error
from intarsia.rounding import Rounding


def judged(function: Any, answer: Any, *inputs: torch.Tensor) -> str | None:
    """What is said of an answer in place of a function of these inputs."""
    graph = make_fx(lambda *args: (function(*args),))(*inputs)
    expected = graph(*inputs)
    return disagreement((answer(*inputs),), expected, Rounding(graph, inputs, expected))


def test_a_masked_logit_excuses_no_other() -> None:
    logits, mask = torch.randn(4, 8) / 25, torch.zeros(4, 8)
    mask[:, 5:] = -1e9
    wrong = judged(lambda x, m: x + m, lambda x, m: torch.where(m < 0, x + m, x * 25), logits, mask)
    assert wrong is not None and "output 0 is off by" in wrong
    assert judged(lambda x, m: x + m, lambda x, m: m + x, logits, mask) is None


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_a_wrong_value_is_found_at_any_scale(scale: float) -> None:
    x = torch.randn(16, 16) * scale
    weight = torch.randn(16, 16)
    assert (
        judged(lambda a, w: torch.relu(a @ w), lambda a, w: torch.relu(a @ w) * 1.001, x, weight) is not None
    )
    assert judged(lambda a, w: torch.relu(a @ w), lambda a, w: (w.t() @ a.t()).t().relu(), x, weight) is None


def test_one_wrong_element_among_many_is_found() -> None:
    def spoilt(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x).clone()
        y[3, 7] += 1e-4
        return y

    assert "at (3, 7)" in str(judged(torch.tanh, spoilt, torch.randn(64, 64)))


def test_cancellation_is_rounding_and_not_a_mistake() -> None:
    """(x + 1e5) - 1e5 keeps few digits of x; an engine that computes in double is not wrong."""
    x = torch.randn(100)

    def lossy(x: torch.Tensor) -> torch.Tensor:
        return ((x * 1.1 + 1e5) - 1e5) * 3.3

    assert judged(lossy, lambda x: (x.double() * 1.1 * 3.3).float(), x) is None
    assert judged(lambda x: x * 1.1 * 3.3, lambda x: lossy(x), x) is not None


def test_the_approximate_gelu_is_not_the_exact_one() -> None:
    x = torch.randn(1000)
    gelu = torch.nn.functional.gelu
    assert judged(gelu, lambda x: gelu(x, approximate="tanh"), x) is not None
    assert judged(gelu, lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)), x) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tolerances_follow_the_dtype(dtype: torch.dtype) -> None:
    x, eps = torch.rand(32, 32).to(dtype), torch.finfo(dtype).eps
    assert judged(torch.exp, lambda x: (torch.exp(x).double() * (1 + 2 * eps)).to(dtype), x) is None
    assert judged(torch.exp, lambda x: (torch.exp(x).double() * (1 + 200 * eps)).to(dtype), x) is not None


def test_integers_are_equal_unless_rounding_flips_them() -> None:
    x = torch.randn(8, 32)
    assert judged(lambda x: x.argmax(-1), lambda x: (x.argmax(-1) + 1) % 32, x) is not None
    near = torch.tensor([[0.1, 0.3, 0.3 + 2.0**-25]])  # the last two are alike in float32 but for rounding
    assert judged(lambda x: (x * 1.7).argmax(-1), lambda x: torch.tensor([2]), near) is None
    tie = torch.tensor([[1.0, 4.0, 4.0]])  # whole numbers are exact: the first of them is the answer
    assert judged(lambda x: x.argmax(-1), lambda x: torch.tensor([2]), tie) is not None


@pytest.mark.parametrize(
    ("answer", "clause"),
    [
        (lambda x: x.double(), "output 0 is torch.float64"),
        (lambda x: x.reshape(-1), "PyTorch makes torch.float32 (2, 2)"),
        (lambda x: x.clone().fill_(torch.nan), "output 0 has NaN or infinity"),
        (lambda x: x.clone().fill_(torch.inf), "output 0 has NaN or infinity"),
        (lambda x: 3.0, "output 0 is a float"),
    ],
)
def test_what_else_is_said(answer: Any, clause: str) -> None:
    assert clause in str(judged(lambda x: x * 2, answer, torch.ones(2, 2)))


def test_specials_must_be_where_pytorch_has_them() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert judged(lambda x: x * 1, lambda x: x, x) is None
    assert judged(lambda x: x * 1, lambda x: -x, x) is not None


@given(st.integers(0, 10_000), st.floats(-8, 8))
def test_another_order_of_adding_up_agrees_and_a_dropped_term_does_not(seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 40, generator=generator) * 10.0**exponent
    weight = torch.randn(40, 5, generator=generator)
    order = torch.randperm(40, generator=generator)
    assert judged(torch.matmul, lambda a, w: a[:, order] @ w[order], x, weight) is None
    assert judged(torch.matmul, lambda a, w: a[:, 1:] @ w[1:], x, weight) is not None


def test_without_runs_the_magnitudes_tell() -> None:
    truth = torch.tensor([-1e9, 0.04, 0.03])
    assert disagreement([truth * (1 + 1e-6)], [truth]) is None
    assert disagreement([torch.tensor([-1e9, 1.0, 0.03])], [truth]) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tensors_of_many_slices_are_judged_as_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Magnitudes of two groups and special values lie in all slices; the model's answer is not touched."""
    drawn = torch.Generator().manual_seed(0)
    truth = torch.randn(40, 50, generator=drawn, dtype=torch.double)
    truth[::2] *= 1e9
    truth[3, 4], truth[30, 2], truth[31, 1] = float("inf"), float("nan"), 0.0
    truth = truth.to(dtype)
    eps = torch.finfo(dtype).eps
    close = (truth.double() * (1 + eps * torch.randn(40, 50, generator=drawn).double())).to(dtype)
    wrong, before = close.clone(), truth.clone()
    wrong[33, 7] += 1
    for length in (64, 1 << 17):
        monkeypatch.setattr("intarsia.plain_tensors.SLICE", length)
        assert disagreement([close], [truth]) is None
        assert "at (33, 7)" in str(disagreement([wrong], [truth]))
        assert "has NaN or infinity" in str(disagreement([close.nan_to_num(nan=0.0)], [truth]))
        assert relative_error(close, truth) < 8 * eps
        assert relative_error(close.nan_to_num(nan=0.0), truth) == float("inf")
    assert torch.equal(truth.nan_to_num(nan=7.5), before.nan_to_num(nan=7.5))


def test_results_of_odd_kinds_are_judged() -> None:
    """Floats of 8 bits, lazily negated ones, the smallest of doubles, and those with gradients."""
    eighth = torch.tensor([1.0, float("nan"), 3.0]).to(torch.float8_e4m3fn)
    other = torch.tensor([1.0, float("nan"), 200.0]).to(torch.float8_e4m3fn)
    assert disagreement([eighth], [eighth.clone()]) is None
    assert "at (2,)" in str(disagreement([other], [eighth]))
    lazy = torch.randn(8, dtype=torch.complex128).conj().imag
    assert lazy.is_neg() and disagreement([lazy.clone()], [lazy]) is None
    assert "is off by" in str(disagreement([lazy.resolve_neg() + 1], [lazy]))
    smallest = torch.tensor([1e-310, 448.0], dtype=torch.double)
    assert "at (0,)" in str(disagreement([torch.tensor([1e-14, 448.0], dtype=torch.double)], [smallest]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grown = torch.tensor([2.0], requires_grad=True)
        assert "is off by 1" in str(disagreement([torch.tensor([1.0])], [grown]))
    assert relative_error(torch.ones(2, 3), torch.ones(3, 2)) == float("inf")


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ w,)


@pytest.mark.parametrize("terms", [64, 1024, 8192])
@pytest.mark.parametrize(("dtype", "wrong"), [(torch.bfloat16, 0.2), (torch.float16, 0.025)])
def test_short_floats_are_added_up_in_long_ones(dtype: torch.dtype, wrong: float, terms: int) -> None:
    """The result is rounded once, however many terms it has: a fifth of it is not rounding."""
    drawn = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=drawn).to(dtype) for shape in ((40, terms), (terms, 30)))
    graph: Any = torch.export.export(Product(), (x, w)).run_decompositions({}).module()
    truth = graph(x, w)
    rounding = Rounding(graph, (x, w), truth)
    assert disagreement([truth[0] * (1 + wrong)], truth, rounding) is not None
    in_blocks = sum(x[:, i::8].float() @ w[i::8].float() for i in range(8))
    assert isinstance(in_blocks, torch.Tensor)
    assert disagreement([in_blocks.to(dtype)], truth, rounding) is None
    assert disagreement([(x.double() @ w.double()).to(dtype)], truth, rounding) is None

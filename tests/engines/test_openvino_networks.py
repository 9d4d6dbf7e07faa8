"""OpenVINO's networks: values found by their names, layers that are probed, weights that are tied."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.convert.programs import network_of
from tests.engines.test_openvino_guards import compiled
from tests.functions import Function
from tests.processors import BFLOAT16
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import intarsia
from intarsia.engines import OpenVINO
from intarsia.engines.openvino import model
from intarsia.engines.openvino.corrections import separate
from intarsia.network import Network

pytestmark = pytest.mark.openvino


class Table(nn.Module):
    """Angles of positions from a table, as GPT-J reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 512).reshape(1, 64, 8))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x * torch.gather(self.table, 1, places.unsqueeze(-1).repeat(1, 1, 8))


def test_guards_find_weights_by_their_names() -> None:
    """What is read at places that vary is a weight: its guard could not be built, and the layer had left."""
    rows, length = torch.export.Dim("rows", min=1, max=8), torch.export.Dim("length", min=2, max=60)
    model, x = Table(), torch.randn(2, 5, 8)
    shapes = {"x": {0: rows, 1: length}, "places": {1: length}}
    fast = intarsia.compile(
        model, (x, torch.arange(5)[None]), engines=["openvino"], dynamic_shapes=shapes, min_block_size=1
    )
    assert fast.plan.engines == ("openvino",)
    x, places = torch.randn(3, 60, 8), torch.randint(0, 64, (1, 60))
    torch.testing.assert_close(fast(x, places), model(x, places))
    places[0, 7] = 64
    with pytest.raises(Exception, match=r"out of (bounds|range)"):
        fast(x, places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_a_sum_with_zero_makes_zero_of_its_negative(dtype: torch.dtype) -> None:
    """OpenVINO leaves such a sum out, and 1 / x then has the other sign."""
    x = torch.randn(4, 64).to(dtype)
    fast = compiled(Function(lambda x: 1 / (x + 0.0)), x)
    x[0, :4] = torch.tensor([-0.0, 0.0, float("nan"), float("inf")]).to(dtype)
    torch.testing.assert_close(fast(x), 1 / (x + 0.0), equal_nan=True)


class Rests(nn.Module):
    """What is guarded is a sum that was replaced, and a rest that was."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.inner(x) + 0.0
        return torch.softmax(total, -1), torch.fmod(total, 0.3)


def test_guards_find_what_was_replaced() -> None:
    torch.manual_seed(0)
    model, x = Rests().eval(), torch.randn(4, 64)
    fast = compiled(model, x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


# What OpenVINO takes, asked of many networks at once: the same as asked of each.


X = torch.randn(2, 3, 4)


def networks() -> list[Network]:
    ops = torch.ops.aten
    calls = [(ops.relu.default, X), (ops.add.Tensor, X, X), (ops.relu.default, X[0])]
    return [network_of(op, *args) for op, *args in calls]


def test_many_are_answered_by_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    own = model._supported
    monkeypatch.setattr(model, "_supported", lambda *told: (asked.append(1), own(*told))[1])
    assert OpenVINO().probe_all(networks()) == [None, None, None]
    assert len(asked) == 1


def test_one_that_is_refused_takes_nobody_along() -> None:
    engine = OpenVINO()
    nets = [*networks(), network_of(torch.ops.aten.relu.default, X.double()), *networks()]
    said = engine.probe_all(nets)
    assert said == [engine.probe(net) for net in nets]
    assert said[3] is not None and said[:3] == said[4:] == [None] * 3


def test_what_fails_together_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model._supported

    def fails(model: object, precision: str) -> object:
        kinds = {op.get_type_name() for op in model.get_ops()}  # type: ignore[attr-defined]
        if "Add" in kinds:
            raise RuntimeError("no sums today")
        return own(model, precision)

    monkeypatch.setattr(model, "_supported", fails)
    assert OpenVINO().probe_all(networks()) == [None, "OpenVINO refuses it: no sums today", None]


def test_what_the_plugin_leaves_out_is_told_of_its_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model._supported
    monkeypatch.setattr(
        model,
        "_supported",
        lambda *told: {name: d for name, d in own(*told).items() if "add" not in name.lower()},
    )
    said = OpenVINO().probe_all(networks())
    assert said[0] is said[2] is None
    assert said[1] is not None and said[1].startswith("OpenVINO's CPU plugin does not take")


# One weight in several products: by rows and by columns, and filters in both directions.


SIZE = 64


class Products(nn.Module):
    def __init__(self, rows: int = SIZE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, SIZE) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.linear(x, self.weight)) @ self.weight


class Straight(Products):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) @ self.weight


class Reshaped(Products):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        square = self.weight.reshape(8, 8, SIZE).reshape(SIZE, SIZE)
        return x @ square, F.linear(x, square), x @ square.t(), (square @ x.t()).t()


class Viewed(nn.Module):
    """As many rows and columns, of other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE // 2) / 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x[:, : SIZE // 2]
        return F.linear(half, self.weight), half @ self.weight.view(SIZE // 2, SIZE)


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 3, 3) / 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(F.conv2d(x, self.weight, padding=1), self.weight, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("rows", [1, 4, 128])
@pytest.mark.parametrize("kind", [Products, Straight, Reshaped, Viewed])
def test_a_weight_is_read_by_rows_and_by_columns(
    kind: type[nn.Module], rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    _agrees(kind().eval().to(dtype), torch.randn(rows, SIZE).to(dtype))


def test_a_filter_is_used_in_both_directions() -> None:
    torch.manual_seed(0)
    _agrees(Filters().eval(), torch.randn(2, 16, 8, 8))


@pytest.mark.parametrize(("rows", "memories"), [(SIZE, 2), (2 * SIZE, 1)])
def test_only_what_could_be_mistaken_is_copied(rows: int, memories: int) -> None:
    """Of a matrix that is not square the packed forms have different sizes."""
    import numpy as np
    import openvino
    from openvino import opset13 as ov

    x = ov.parameter([4, SIZE], np.float32)
    weight = ov.constant(np.ones((rows, SIZE), np.float32))
    product = ov.matmul(ov.matmul(x, weight, False, True), weight, False, False)
    model = openvino.Model([product], [x])
    separate(model)
    assert len([op for op in model.get_ops() if op.get_type_name() == "Constant"]) == memories


def _agrees(model: nn.Module, x: torch.Tensor) -> None:
    # Unverified: what an engine answers wrongly would otherwise run in PyTorch.
    fast = intarsia.compile(model, (x,), engines=["openvino"], min_block_size=1, verify=False)
    assert fast.plan.engines == ("openvino",)
    # Compared with float64: PyTorch's kernels for bfloat16 round in other places on other processors.
    with torch.no_grad():
        answers, truths = fast(x), copy.deepcopy(model).double()(x.double())
    for answer, truth in zip(tree_leaves(answers), tree_leaves(truths), strict=True):
        assert float((answer.double() - truth).abs().max() / truth.abs().max()) < 8 * torch.finfo(x.dtype).eps

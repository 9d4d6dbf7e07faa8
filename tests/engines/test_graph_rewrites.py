"""Rewrites of ATen graphs: the same answers up to rounding, applied where they fit and only there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.engines.rewritten import applied, lowered, targets
from torch import nn

from intarsia.engines.graph_rewrites import (
    REWRITES,
    apply,
    apply_rewrites,
    fused_products,
    products,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("convolution", "size", "count"),
    [
        (nn.Conv2d(3, 8, 4, 4), (2, 3, 8, 12), 1),
        (nn.Conv2d(3, 8, (2, 3), (2, 3), bias=False), (1, 3, 4, 9), 1),
        (nn.Conv2d(3, 8, 4, 4), (2, 3, 9, 12), 0),  # the rest of the image is left out
        (nn.Conv2d(3, 8, 4, 4, padding=2), (2, 3, 8, 8), 0),
        (nn.Conv2d(4, 8, 2, 2, groups=2), (2, 4, 8, 8), 0),
        (nn.Conv2d(3, 8, 2, 2, dilation=2), (2, 3, 8, 8), 0),
        (nn.Conv2d(3, 8, 3, 2), (2, 3, 8, 8), 0),
        (nn.Conv2d(3, 8, 1), (2, 3, 8, 8), 0),
    ],
)
def test_patch_convolutions(convolution: nn.Module, size: tuple[int, ...], count: int) -> None:
    found, module = applied(convolution, torch.randn(size), "patch_convolutions")
    assert found == count
    assert (aten.conv2d.default in targets(module)) is not bool(count)


class Attention(nn.Module):
    def __init__(self, bias: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8, bias[0]), nn.Linear(8, 4, bias[1]), nn.Linear(8, 4, bias[2])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(self.q(x)), self.k(x), self.v(x).sum(-1)


@pytest.mark.parametrize(
    ("bias", "count", "products"),
    [((True,) * 3, 1, 1), ((False,) * 3, 1, 1), ((True, False, True), 1, 2), ((True, False, False), 1, 2)],
)
def test_products_of_one_input_are_merged(bias: tuple[bool, bool, bool], count: int, products: int) -> None:
    found, module = applied(Attention(bias), torch.randn(2, 5, 8), "merged_products")
    assert found == count
    assert targets(module).count(aten.linear.default) == products


class Residual(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1, bias=bias), nn.Conv2d(4, 4, 1, bias=bias)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.data.normal_()
            norm.bias.data.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + x)


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norms_are_folded(bias: bool) -> None:
    found, module = applied(Residual(bias), torch.randn(2, 4, 5, 5), "batch_norms")
    assert found == 2
    assert not [target for target in targets(module) if "batch_norm" in str(target)]


def test_a_convolution_that_is_read_elsewhere_keeps_its_norm() -> None:
    class Twice(Residual):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.first(x)
            return self.norms[0](y), y

    found, _ = applied(Twice(True), torch.randn(2, 4, 5, 5), "batch_norms")
    assert found == 0


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_are_fused_with_what_follows(bias: bool) -> None:
    """The fused kernels exist on a GPU only; here it is the graph that is looked at."""
    module = lowered(Residual(bias), torch.randn(2, 4, 5, 5))
    assert apply_rewrites(module, ["batch_norms", "fused_convolutions"])["fused_convolutions"] == 2
    assert targets(module) == [
        aten.contiguous.default,
        aten.cudnn_convolution_relu.default,
        aten.cudnn_convolution_add_relu.default,
        aten.contiguous.default,  # the result is laid out as it was
    ]
    for name, value in module.named_buffers():
        assert value.dim() != 4 or value.is_contiguous(memory_format=torch.channels_last), name


def test_a_sum_that_broadcasts_is_not_fused() -> None:
    class Broadcasts(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.first(x) + x.mean((2, 3), keepdim=True))

    module = lowered(Broadcasts(True), torch.randn(2, 4, 5, 5))
    assert apply_rewrites(module, ["fused_convolutions"]) == {"fused_convolutions": 0}


class Computed(nn.Module):
    """A weight that is an input's function is no constant."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), nn.functional.linear(x, x * 2)


def test_only_constant_weights_are_merged() -> None:
    found, _ = applied(Computed(), torch.randn(8, 8), "merged_products")
    assert found == 0


def test_every_rewrite_leaves_a_graph_without_its_pattern_alone() -> None:
    module = lowered(nn.ReLU(), torch.randn(3))
    assert apply_rewrites(module, REWRITES) == dict.fromkeys(REWRITES, 0)


class NewGelu(nn.Module):
    """GPT-2's own spelling of the tanh form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Conv1D(nn.Module):
    """A product as GPT-2 writes it: `addmm` on rows, the weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(*x.shape[:-1], 16)


@pytest.mark.parametrize(
    ("activation", "gelu"),
    [
        (nn.ReLU(), False),
        (nn.GELU(approximate="tanh"), True),
        (NewGelu(), True),
        (nn.GELU(), None),  # the exact form is another function
        (nn.Tanh(), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("product", [nn.Linear(8, 16), Conv1D()], ids=["linear", "addmm"])
def test_activations_of_products(
    product: nn.Module, activation: nn.Module, gelu: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_products, "_on_gpu", lambda node: True)
    module = lowered(nn.Sequential(product, activation), torch.randn(2, 3, 8))
    assert apply_rewrites(module, ["activation_epilogues"]) == {"activation_epilogues": int(gelu is not None)}
    fused = [n.args[3] for n in module.graph.nodes if n.target is torch.ops.intarsia.addmm_activation.default]
    assert fused == ([] if gelu is None else [gelu])


def test_a_product_that_is_read_elsewhere_keeps_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.product(x)
            return NewGelu()(y) + y

    monkeypatch.setattr(fused_products, "_on_gpu", lambda node: True)
    assert apply_rewrites(lowered(Both(), torch.randn(2, 8)), ["activation_epilogues"]) == {
        "activation_epilogues": 0
    }


def test_what_cannot_be_measured_is_told_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*given: object) -> tuple[str, ...]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    monkeypatch.setattr(apply, "_key", lambda *given: "a graph on a GPU")
    monkeypatch.setattr(apply, "_measured", full)
    module = lowered(nn.ReLU(), torch.randn(3))
    with pytest.warns(UserWarning, match="all are applied: OutOfMemoryError: no room"):
        assert apply.paying(module, ["merged_products"]) == ("merged_products",)
    monkeypatch.setattr(apply, "_measured", lambda *given: ())
    assert apply.paying(module, ["merged_products"]) == ()


class Residuals(nn.Module):
    """Two products whose results are added to something, one that is only activated."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.bare = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        return x * self.bare(x).transpose(1, 2).transpose(1, 2)


class Addmm(nn.Module):
    def __init__(self, beta: float = 1) -> None:
        super().__init__()
        self.product, self.beta = Conv1D(), beta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.product.bias, x.view(-1, 8), self.product.weight, beta=self.beta)
        return rows.view(2, 3, 16) + 1.5


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        return y + torch.relu(y)


@pytest.mark.parametrize(
    ("model", "count"),
    [(Residuals(), 2), (Addmm(), 1), (Addmm(0.5), 0), (ReadTwice(), 0), (Computed(), 0)],
    ids=["residuals", "addmm", "addmm with a scaled bias", "read twice", "a weight that is computed"],
)
@pytest.mark.parametrize("slices", [2, 4])
def test_split_products(model: nn.Module, count: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with float32 results exists on a GPU only; here the same product stands in for it."""
    x = torch.randn(8, 8) if isinstance(model, Computed) else torch.randn(2, 3, 8)
    module = lowered(model, x)
    with torch.no_grad():
        expected = module(x)
        assert products.split_by(module, lambda *given: slices) == count
        for node in module.graph.find_nodes(op="call_function", target=aten.bmm.dtype):
            node.target, node.args = aten.bmm.default, node.args[:2]
        module.recompile()
        for answer, truth in zip(module(x), expected, strict=True):
            torch.testing.assert_close(answer, truth, rtol=1e-5, atol=1e-5)


def test_slices_of_weights_are_views_of_them() -> None:
    module = lowered(Residuals(), torch.randn(2, 3, 8))
    before = {value.untyped_storage().data_ptr() for value in module.buffers()}
    products.split_by(module, lambda *given: 2)
    sliced = [value for name, value in module.named_buffers() if name.startswith("_sliced")]
    assert len(sliced) == 2
    assert {value.untyped_storage().data_ptr() for value in sliced} <= before


def test_products_on_the_cpu_are_not_measured() -> None:
    assert products.measured_slices(128, 768, 3072, torch.float16, torch.device("cpu")) == 1

"""Products, convolutions, pooling, norms, reductions: converted once, run at three shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from tests.convert.equal import assert_equal, kinds
from tests.convert.samples import BEFORE_TORCH_2_12
from torch import nn
from torch.export import Dim

BATCH = Dim("batch", min=1, max=64)
LENGTH = Dim("length", min=6, max=512)
torch.manual_seed(0)
WEIGHT, BIAS = torch.randn(6, 8), torch.randn(6)
KERNEL = torch.randn(4, 8, 3)
SCALE, SHIFT = torch.randn(8), torch.randn(8)
MEAN, VARIANCE = torch.randn(8), torch.rand(8) + 0.5

# over (batch, length, 8)
ROWS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: f.linear(x, WEIGHT, BIAS),
    "matmul": lambda x: x @ WEIGHT.T,
    "bmm": lambda x: x @ x.transpose(1, 2),
    "layer_norm": lambda x: f.layer_norm(x, (8,), SCALE, SHIFT),
    "rms_norm": lambda x: f.rms_norm(x, (8,), SCALE),
    "softmax": lambda x: torch.softmax(x, 1),
    "logsumexp": lambda x: torch.logsumexp(x, (1, 2)),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((0, 1)),
    "var": lambda x: x.var(1, keepdim=True),
    "std": lambda x: x.std(),
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1),
    "max.dim": lambda x: tuple(x.max(1)),
    "norm": lambda x: x.norm(dim=(1, 2)),
    "normalize": lambda x: f.normalize(x, dim=1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: tuple(x.sort(1)),
    "topk": lambda x: x.topk(3, 1)[0],
    "any": lambda x: (x > 2).any(1),
    "cdist": lambda x: torch.cdist(x, x + 1, p=1.0),
}
# over (batch, 8, length)
PLANES: dict[str, Callable[[Any], Any]] = {
    "conv1d": lambda x: f.conv1d(x, KERNEL, padding=1),
    "conv1d same": lambda x: f.conv1d(x, KERNEL, padding="same"),
    "conv strided": lambda x: f.conv1d(x, KERNEL, stride=2, dilation=1),
    "conv_transpose": lambda x: f.conv_transpose1d(x, KERNEL.transpose(0, 1), stride=2, output_padding=1),
    "batch_norm": lambda x: f.batch_norm(x, MEAN, VARIANCE, SCALE, SHIFT),
    "group_norm": lambda x: f.group_norm(x, 2, SCALE, SHIFT),
    "instance_norm": lambda x: f.instance_norm(x, weight=SCALE, bias=SHIFT),
    "max_pool": lambda x: f.max_pool2d(x[..., None], (3, 1), (2, 1), (1, 0)),
    "max_pool indices": lambda x: tuple(f.max_pool2d(x[..., None], (3, 1), return_indices=True)),
    "avg_pool": lambda x: f.avg_pool1d(x, 3, 2, 1),
    "avg_pool exclusive": lambda x: f.avg_pool1d(x, 3, 2, 1, count_include_pad=False),
    "adaptive_avg_pool": lambda x: f.adaptive_avg_pool1d(x, 1),
    "nearest": lambda x: f.interpolate(x[..., None], scale_factor=2, mode="nearest"),
    "bilinear": lambda x: f.interpolate(x[..., None], scale_factor=2, mode="bilinear"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    calls = [(torch.randn(b, n, 8),) for b, n in ((2, 7), (3, 9), (1, 33))]
    assert_equal(ROWS[name], *calls, dynamic=({0: BATCH, 1: LENGTH},))


@pytest.mark.parametrize("name", PLANES)
def test_planes(name: str) -> None:
    calls = [(torch.randn(b, 8, n),) for b, n in ((2, 6), (3, 9), (1, 33))]
    assert_equal(PLANES[name], *calls, dynamic=({0: BATCH, 2: LENGTH},))


def test_linear_reads_the_weight_as_torch_keeps_it() -> None:
    net = assert_equal(ROWS["linear"], (torch.randn(2, 5, 8),))
    assert kinds(net) == ["Reshape", "Gemm", "Reshape"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]
)
def test_recurrent(kind: Any, options: dict[str, Any]) -> None:
    if kind is nn.LSTM and BEFORE_TORCH_2_12:
        pytest.skip("this torch tells a wrong shape of an LSTM's last states, so the node is refused")
    module = kind(5, 7, **options).eval()
    net = assert_equal(lambda x: module(x)[0], (torch.randn(3, 4, 5),))
    read = [layer.get_inputs()[1:3] for layer in net.get_layers() if layer.kind == kind.__name__]
    assert read and all(weight.constant is not None for weights in read for weight in weights)

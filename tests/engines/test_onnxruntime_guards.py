"""Calls whose values ONNX Runtime would treat unlike PyTorch are answered by PyTorch, with one warning."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from tests.convert.programs import network_of, program_of
from tests.functions import Function
from torch import nn

import intarsia
from intarsia.convert import convert
from intarsia.engines import OnnxRuntime
from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.onnxruntime.model import OnnxRuntimeLimits
from intarsia.errors import GuardError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

NAN, INF = math.nan, math.inf
ONES = np.ones(4, np.float32)
G = torch.Generator().manual_seed(0)
IMAGE = torch.randn(1, 2, 6, 6, generator=G)
GRID = torch.rand(1, 4, 4, 2, generator=G) * 2 - 1
SEQUENCE = torch.randn(2, 3, 4, generator=G)
torch.manual_seed(0)


def changed(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[x.numel() // 2] = value
    return x


def sampled(mode: str, padding: str) -> Function:
    return Function(lambda x, g: TF.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=False))


def attending(causal: bool, scale: float | None) -> Function:
    return Function(lambda q, v, k: TF.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale))


def qkv(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The keys are those that hold special values: `given` turns the order round."""
    v, q, k = (torch.randn(2, 2, 4, 4, generator=G).to(dtype) for _ in range(3))
    return k, v, q


EDGES = [NAN, INF, -INF, 3e38, -3e38]
CALLS: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], list[float]]] = {
    "max_pool2d": (Function(lambda x: TF.max_pool2d(x, 3, 2, 1)), (IMAGE,), [NAN, -INF]),
    "max_pool2d behind a convolution": (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)),
        (IMAGE,),
        [NAN, INF],
    ),
    "max_pool2d of an image without a batch": (
        Function(lambda x: TF.max_pool2d(x, 1)),
        (IMAGE[0],),
        [NAN, -INF],
    ),
    "max_pool2d behind a mask": (
        Function(lambda x: TF.max_pool2d(x.masked_fill(x > 9, -INF), 1)),
        (IMAGE,),
        [NAN, INF, -INF],
    ),
    "max_pool2d, places": (
        Function(lambda x: TF.max_pool2d(x, 2, return_indices=True)),
        (IMAGE,),
        [NAN, -INF],
    ),
    "lstm": (Function(lambda m, x: m(x)[0], nn.LSTM(4, 5)), (SEQUENCE,), [NAN]),
    "gru": (Function(lambda m, x: m(x)[0], nn.GRU(4, 5)), (SEQUENCE,), [NAN]),
    "lstm behind a layer": (
        Function(lambda a, m, x: m(a(x))[0], nn.Linear(4, 4), nn.LSTM(4, 5)),
        (SEQUENCE,),
        [NAN],
    ),
    "layer norm": (nn.LayerNorm(4), (SEQUENCE,), [NAN, INF, 1e20, 1e30, 3e38]),
    "layer norm behind a layer": (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8)),
        (SEQUENCE,),
        [NAN, 1e30, 3e38],
    ),
    "group norm": (nn.GroupNorm(1, 2), (IMAGE,), [NAN, INF, 1e25, 3e38]),
    "instance norm": (nn.InstanceNorm2d(2), (IMAGE,), [NAN, INF, 1e25, 3e38]),
    "deviation": (Function(lambda x: x.std(-1)), (SEQUENCE,), [NAN, INF, 1e20, 3e38]),
    "upsample": (
        Function(lambda x: TF.interpolate(x, scale_factor=2, mode="bilinear")),
        (IMAGE,),
        [INF, NAN],
    ),
    "upsample of one row": (
        Function(lambda x: TF.interpolate(x, scale_factor=2.0, mode="bilinear")),
        (torch.randn(2, 1, 1, 4, generator=G),),
        [INF, -INF, NAN],
    ),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), (IMAGE,), [INF, NAN]),
    **{
        f"attention {dtype}, causal {causal}, scale {scale}": (attending(causal, scale), qkv(dtype), EDGES)
        for causal, scale in ((False, None), (True, None), (False, -0.5))
        for dtype in (torch.float32, torch.float64)
    },
    **{
        f"grid_sample {mode} {padding}": (
            sampled(mode, padding),
            (GRID, IMAGE),
            [NAN, INF, -INF, 1e10, -3e38],
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
    },
}


@pytest.mark.filterwarnings("ignore:PyTorch runs this call")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", CALLS)
def test_special_values_are_answered_as_by_pytorch(name: str, engine: str) -> None:
    model, inputs, values = CALLS[name]
    given = inputs[::-1]  # the first is the one that holds them
    fast = intarsia.compile(model.eval(), given, engines=[engine], min_block_size=1)
    with torch.no_grad():
        for value in values:
            call = (*given[:-1], changed(given[-1], value))
            torch.testing.assert_close(fast(*call), model(*call), rtol=1e-4, atol=1e-5, equal_nan=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_one_warning_names_the_input_and_its_values() -> None:
    fast = intarsia.compile(
        Function(lambda x: TF.max_pool2d(x, 2)), (IMAGE,), engines=["onnxruntime"], min_block_size=1
    )
    with pytest.warns(
        UserWarning, match="PyTorch runs this call in place of an engine: args_0 must not hold NaN"
    ):
        fast(changed(IMAGE, NAN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(changed(IMAGE, NAN))


def test_a_pool_is_one_layer_and_one_guard_of_the_input() -> None:
    """NaN never comes: nothing in the network waits for it."""
    net = network_of(torch.ops.aten.max_pool2d.default, IMAGE, [2, 2])
    assert [layer.kind for layer in net.get_layers()] == ["MaxPool"]
    net_of = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 3))
    # Which fusions pay is measured, and a fused convolution is not known to keep what is finite.
    fast = intarsia.compile(net_of.eval(), (IMAGE,), engines=["onnxruntime"], min_block_size=1, rewrite=False)
    (step,) = fast.inlay.steps
    assert step.program.program.guards == [
        "input_1 must be finite, the sum of its magnitudes at most 6.872e+10"
    ]


def test_a_model_of_plain_layers_has_no_guards() -> None:
    fast = intarsia.compile(nn.Linear(6, 6), (IMAGE,), engines=["onnxruntime"], min_block_size=1)
    (step,) = fast.inlay.steps
    assert step.program.program.guards == []


def test_without_guards_values_are_trusted() -> None:
    engine = OnnxRuntime(guards=False)
    pooled = Function(lambda x: TF.max_pool2d(x, 2, padding=1))
    fast = intarsia.compile(pooled, (IMAGE,), engines=[engine], min_block_size=1)
    (step,) = fast.inlay.steps
    assert step.program.program.guards == []
    assert not fast(torch.full_like(IMAGE, -INF)).isinf().all()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_row_hidden_whole_is_not_a_number(engine: str) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hide: torch.Tensor) -> torch.Tensor:
        return torch.softmax((q @ k.mT).masked_fill(hide, -INF), -1) @ v

    q, k, v = (torch.randn(2, 4, 6, 8, generator=G) for _ in range(3))
    hide = torch.zeros(2, 4, 6, 6, dtype=torch.bool)
    hide[:, :, :, 4] = True
    fast = intarsia.compile(Function(attend), (q, k, v, hide), engines=[engine], min_block_size=1)
    hide[0, 1, 2] = True
    torch.testing.assert_close(
        fast(q, k, v, hide), attend(q, k, v, hide), equal_nan=True, rtol=1e-4, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:PyTorch runs this call")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_the_largest_of_nothing_but_minus_infinity(engine: str) -> None:
    """Kernels start from the least finite number, which a padded window then keeps."""
    model = Function(lambda x: TF.max_pool2d(x, 2, padding=1))
    fast = intarsia.compile(model, (IMAGE,), engines=[engine], min_block_size=1)
    assert fast.plan.on_engines == 1
    assert fast(torch.full_like(IMAGE, -INF)).tolist() == model(torch.full_like(IMAGE, -INF)).tolist()


@pytest.mark.filterwarnings("ignore:PyTorch runs this call")
def test_a_norm_fused_with_its_residual_minds_squares_that_overflow() -> None:
    model = Function(lambda a, b, x, y: b(a(x + y) + y), nn.LayerNorm(4), nn.LayerNorm(4)).eval()
    engine, other = OnnxRuntime(), SEQUENCE.flip(0)
    fast = intarsia.compile(
        model, (SEQUENCE, other), engines=[engine], min_block_size=1, rewrite=["residual_norm"]
    )
    with torch.no_grad():
        for value in (NAN, 1e20, 3e38):
            call = (changed(SEQUENCE, value), other)
            torch.testing.assert_close(fast(*call), model(*call), equal_nan=True)
    net = Network("two")
    with net_guard(net):
        x, y = Tensor("x", torch.float32, (2, 3, 4)), Tensor("y", torch.float32, (2, 3, 4))
        for _ in range(2):
            x = F.ops("SkipLayerNormalization", x, y, ONES, ONES, outputs=4, domain="com.microsoft")[0]
        x.mark_output("z")
    # What a norm has made is bounded: the second one needs no look at it.
    assert {guard.tensors for guard in plan_guards(net, OnnxRuntimeLimits()).all()} == {("x",), ("y",)}


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 3, 2, 2).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:PyTorch runs this call")
def test_attention_on_rows_minds_what_attention_minds() -> None:
    model = Function(
        lambda q, k, v: (
            TF.scaled_dot_product_attention(*map(heads, (q, k, v))).transpose(1, 2).reshape(2, 3, 4)
        )
    )
    rows = (SEQUENCE, SEQUENCE.flip(0), SEQUENCE.flip(1))
    fast = intarsia.compile(
        model, rows, engines=["onnxruntime"], min_block_size=1, rewrite=["multi_head_attention"]
    )
    for value in EDGES:
        for place in range(3):
            call = [changed(x, value) if i == place else x for i, x in enumerate(rows)]
            torch.testing.assert_close(fast(*call), model(*call), equal_nan=True)
    net = Network("bounded")
    with net_guard(net):
        normed = F.layer_norm(Tensor("x", torch.float32, (2, 3, 4)), ONES, ONES)
        made = F.opaque(
            "com.microsoft",
            "MultiHeadAttention",
            *[normed] * 3,
            makes=[(torch.float32, (2, 3, 4))],
            num_heads=2,
        )[0]
        F.layer_norm(made, ONES, ONES).mark_output("y")
    assert [guard.tensors for guard in plan_guards(net, OnnxRuntimeLimits()).all()] == [("x",)]


def test_what_a_bound_session_refuses_is_left_for_that_call_alone() -> None:
    """Sessions with bfloat16 run bound, where a refused index is an error of no type of its own."""
    x = torch.arange(40.0).flip(0).to(torch.bfloat16)
    program = OnnxRuntime().build(convert(program_of(lambda x: torch.sort(x)[1], x)))
    with pytest.raises(GuardError, match="Gather"):
        program(torch.zeros_like(x))
    assert torch.equal(program(x)[0], torch.arange(40).flip(0))

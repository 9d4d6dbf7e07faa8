"""What OpenVINO's fusions look for is there for them to see, and only where it is what they take it for."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.processors import BFLOAT16, needs_bfloat16
from torch import nn

import intarsia
from intarsia.engines.guards.kinds import ValueGuard
from intarsia.engines.openvino import engine as openvino_engine
from intarsia.engines.openvino import halves
from intarsia.engines.openvino.core import core
from intarsia.engines.openvino.model import _number
from intarsia.errors import EngineError

openvino = pytest.importorskip("openvino")
ov = pytest.importorskip("openvino.opset13")
F = nn.functional


def _turned(x: torch.Tensor, half: int) -> torch.Tensor:
    return torch.cat([-x[..., half:], x[..., :half]], -1)


class Rotary(nn.Module):
    """Angles of positions, as decoders compute them, for four heads of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query = self.query(x).reshape(rows, length, 4, 16).transpose(1, 2)
        angles = positions[:, None, :, None].float() * 10 ** -torch.linspace(0, 4, 16)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return query * cos + _turned(query, 8) * sin


class Block(nn.Module):
    """A norm and a gate, as decoders have them."""

    def __init__(self, size: int = 64, biased: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.gate, self.up = nn.Linear(size, 96, bias=biased), nn.Linear(size, 96, bias=biased)
        self.down = nn.Linear(96, size, bias=biased)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = self.weight * wide.to(x.dtype)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The models that are compiled, and what to; bfloat16 arithmetic is taken to be there."""
    seen: list[tuple[Any, Any]] = []
    before = halves.compiled

    def watched(model: Any, config: Any) -> Any:
        found = before(model, config)
        seen.append((model, found))
        return found

    monkeypatch.setattr(halves, "compiled", watched)
    monkeypatch.setattr(halves, "capabilities", lambda: ["BF16"])
    return seen


def _equal(model: nn.Module, *args: torch.Tensor) -> None:
    fast = intarsia.compile(model.eval(), args, engines=["openvino"])
    assert fast.plan.engines == ("openvino",)
    with torch.no_grad():
        found, expected = fast(*args), model(*args)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    bound = 2**-6 if expected.dtype == torch.bfloat16 else 1e-5
    assert (found - expected).abs().max() <= bound * expected.abs().max()


def _kinds(compiled: Any) -> Counter[str]:
    layers = compiled.get_runtime_model().get_ops()
    return Counter(layer.get_rt_info()["layerType"].astype(str) for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_rotary_embeddings_are_one_kernel(made: list[tuple[Any, Any]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(2, 5, 64).to(dtype), torch.arange(900, 905).expand(2, 5)
    _equal(Rotary().to(dtype), x, positions)
    assert _kinds(made[0][1])["RoPE"] == 1


NO_ROTATIONS = {
    "parts that are no halves": lambda x, c, s: x * c + torch.cat([-x[..., 6:], x[..., :6]], -1) * s,
    "halves in their own places": lambda x, c, s: x * c + torch.cat([-x[..., :8], x[..., 8:]], -1) * s,
    "the other half negated": lambda x, c, s: x * c + torch.cat([x[..., 8:], -x[..., :8]], -1) * s,
    "of another value": lambda x, c, s: x * c + _turned(x + 1, 8) * s,
    "halves that overlap": lambda x, c, s: x * c + torch.cat([-x[..., 8:], x[..., 1:9]], -1) * s,
    "a difference": lambda x, c, s: x * c - _turned(x, 8) * s,
    "an angle for a row": lambda x, c, s: x * c[..., :1] + _turned(x, 8) * s[..., :1],
    "angles of a larger value": lambda x, c, s: x[:, :1] * c + _turned(x[:, :1], 8) * s,
    "squares": lambda x, c, s: x * x + _turned(x, 8) * s,
}


class Applied(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.query = kind, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query = self.query(x).reshape(rows, length, 4, 16).transpose(1, 2)
        turned: torch.Tensor = NO_ROTATIONS[self.kind](query, cos, sin)
        return turned


@pytest.mark.parametrize("kind", NO_ROTATIONS)
def test_what_is_no_rotation_is_not_taken_for_one(made: list[tuple[Any, Any]], kind: str) -> None:
    """The example is told apart from others by nothing: OpenVINO's kernel would be right for it alone."""
    torch.manual_seed(0)
    shape = (2, 4, 5, 16) if "larger" in kind else (2, 1, 5, 16)
    model, x = Applied(kind).eval(), torch.randn(2, 5, 64)
    example = (torch.zeros(2, 5, 64), torch.zeros(shape), torch.zeros(shape))
    fast = intarsia.compile(model, example, engines=["openvino"])
    cos, sin = torch.randn(shape), torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, cos, sin), model(x, cos, sin), rtol=1e-4, atol=1e-5)
    assert made and all(kind == "squares" or not _kinds(compiled)["RoPE"] for _, compiled in made)


@needs_bfloat16
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5, 64), (7, 64)], ids=str)
def test_norms_and_gates_of_bfloat16_have_no_layers_between(
    made: list[tuple[Any, Any]], shape: tuple[int, ...], biased: bool
) -> None:
    torch.manual_seed(0)
    _equal(Block(biased=biased).bfloat16(), torch.randn(shape).bfloat16())
    model, compiled = made[0]
    assert _kinds(compiled)["RMS"] == 1
    kinds = Counter(layer.get_type_name() for layer in model.get_ops())
    assert kinds["MatMul"] == 3 and not kinds["Reshape"]
    assert {
        op.get_element_type().get_type_name() for op in model.get_ops() if op.get_type_name() == "Sigmoid"
    } == {"bf16"}


@needs_bfloat16
def test_lengths_that_vary_keep_their_rank(made: list[tuple[Any, Any]]) -> None:
    torch.manual_seed(0)
    model, x = Block().bfloat16().eval(), torch.randn(1, 6, 64).bfloat16()
    length = torch.export.Dim("length", min=2, max=64)
    fast = intarsia.compile(model, (x,), dynamic_shapes={"x": {1: length}}, engines=["openvino"])
    for count in (2, 17, 64):
        x = torch.randn(1, count, 64).bfloat16()
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=2**-6, atol=2**-6)
    assert not any(op.get_type_name() == "Reshape" for op in made[0][0].get_ops())


@needs_bfloat16
def test_what_may_be_rounded_is_what_is_rounded_anyway(made: list[tuple[Any, Any]]) -> None:
    """The layers of a norm, once it is one kernel, and layers between numbers of bfloat16; no others."""
    torch.manual_seed(0)
    _equal(Block().bfloat16(), torch.randn(1, 3, 64).bfloat16())
    model = made[0][0]
    (weighted,) = (op for op in model.get_ops() if len(halves._layers_of_norm(op, _names(model))) == 7)
    assert weighted.get_type_name() == "Multiply"
    assert not halves._layers_of_norm(weighted, set()), "without the kernel it would be rounded in between"
    long = [op for op in model.get_ops() if halves._touches_float32(op)]
    assert len(long) == 7 and not any(map(halves._may_round, long))


@needs_bfloat16
def test_a_guard_of_its_squares_leaves_a_norm_one_kernel(made: list[tuple[Any, Any]]) -> None:
    """In deep decoders the squares of a norm are guarded; the last 23 of 49 were not taken for norms."""

    torch.manual_seed(0)
    _equal(Block().bfloat16(), torch.randn(1, 3, 64).bfloat16())
    model = made[0][0]
    (squares,) = (op for op in model.get_ops() if op.get_type_name() == "Power")
    total = _number(ov, ValueGuard("squares", -1e38, 1e38, True), {"squares": squares.output(0)})[0]
    assert total.input_value(0) == squares.output(0), "float32 is looked at as it is"
    model.add_results([ov.result(total)])
    assert any(len(halves._layers_of_norm(op, _names(model))) == 7 for op in model.get_ops())


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        return wide.sum(-1).to(x.dtype), wide.exp().sum(-1)


@needs_bfloat16
def test_a_sum_of_short_numbers_may_be_short_and_others_not(made: list[tuple[Any, Any]]) -> None:
    torch.manual_seed(0)
    engine, x = openvino_engine.OpenVINO(guards=False), torch.randn(4, 64).bfloat16()
    fast = intarsia.compile(Sums(), (x,), engines=[engine], min_block_size=1)
    assert all(torch.allclose(a, b, rtol=1e-2) for a, b in zip(fast(x), Sums()(x), strict=True))
    touching = [op for op in made[0][0].get_ops() if halves._touches_float32(op)]
    may = [(op.get_type_name(), halves._may_round(op)) for op in touching]
    assert sorted(may) == [("Exp", False), ("ReduceSum", False), ("ReduceSum", True)]


class Compares(nn.Module):
    """Positions beyond what bfloat16 counts, numbers that bfloat16 takes for equal, and what is moved."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x > y, places.float() * 0.5, torch.cat([x, y], 1).t() * 2, x.bfloat16() > y.bfloat16()


@needs_bfloat16
def test_what_reads_float32_or_moves_it_may_not_round(made: list[tuple[Any, Any]]) -> None:
    x = torch.ones(4, 64)
    engine, places = openvino_engine.OpenVINO(guards=False), torch.arange(5000, 5064).expand(4, 64)
    fast = intarsia.compile(Compares(), (x + 1e-3, x, places), engines=[engine], min_block_size=1)
    assert fast(x + 1e-3, x, places)[0].all()
    touching = [op for op in made[0][0].get_ops() if halves._touches_float32(op)]
    may = {op.get_type_name() for op in touching if not halves._may_round(op)}
    assert {"Less", "Convert", "Concat", "Transpose"} <= may
    assert sorted(halves._may_round(op) for op in touching if op.get_type_name() == "Less") == [False, True]


class Rows(nn.Module):
    """What looks like a bias is one of rows, and what looks like a weight is a vector."""

    def __init__(self, kind: str, count: int) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(96, 64))
        self.rows, self.vector = nn.Parameter(torch.randn(count, 1)), nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        flat = x.reshape(-1, 64)
        if self.kind == "vector":
            return torch.mv(flat, self.vector).reshape(rows, length, 1) * 2
        return (flat @ self.weight.t() + self.rows).reshape(rows, length, 96)


@pytest.mark.parametrize("kind", ["vector", "rows"])
@pytest.mark.parametrize("shape", [(3, 1, 64), (1, 3, 64), (3, 3, 64), (4, 2, 64)], ids=str)
def test_rows_are_no_columns(made: list[tuple[Any, Any]], kind: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model, x = Rows(kind, shape[0] * shape[1]).bfloat16().eval(), torch.randn(shape).bfloat16()
    fast = intarsia.compile(model, (x,), engines=["openvino"], min_block_size=1)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize(
    ("scale", "fits"), [(1.0, True), (1e-6, False), (1e6, False), (float("nan"), False), (0.0, True)]
)
@needs_bfloat16
def test_weights_that_float16_cannot_hold_keep_the_kernel_away(
    made: list[tuple[Any, Any]], scale: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "capabilities", lambda: ["BF16"])
    torch.manual_seed(0)
    block = Block().bfloat16().eval()
    with torch.no_grad():
        block.up.weight[5] *= scale
    engine = openvino_engine.OpenVINO(guards=False)
    intarsia.compile(block, (torch.randn(1, 3, 64).bfloat16(),), engines=[engine])
    assert halves._suits(made[0][0]) is fits


@needs_bfloat16
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_without_pairs_of_threads_the_kernel_is_not_tried(
    made: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """With one thread it would divide by 0; a process has no more than the cores it may use."""
    tried: list[str] = []
    real = core()

    class Watched:
        def compile_model(self, model: Any, device: str, config: dict[str, Any]) -> Any:
            tried.append(config["INFERENCE_PRECISION_HINT"])
            return real.compile_model(model, device, {**config, "INFERENCE_PRECISION_HINT": "f32"})

    monkeypatch.setattr(halves, "capabilities", lambda: ["BF16"])
    monkeypatch.setattr(halves, "core", Watched)
    engine = openvino_engine.OpenVINO(threads=threads)
    intarsia.compile(Block().bfloat16().eval(), (torch.randn(1, 3, 64).bfloat16(),), engines=[engine])
    has_pairs = min(threads, len(os.sched_getaffinity(0))) % 2 == 0
    assert tried and ("bf16" in tried) is has_pairs


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
@pytest.mark.parametrize("threads", [1, 2])
def test_short_arithmetic_without_pairs_of_threads_refuses_gates(activation: Any, threads: int) -> None:
    """Where OpenVINO computes all in bfloat16 anyway, nothing else keeps its kernel away."""
    x, weights = ov.parameter([1, 3, 64], np.float32), [np.ones((64, 64), np.float32)] * 3
    gate, up = (ov.matmul(x, ov.constant(weight), False, True) for weight in weights[:2])
    gate = ov.swish(gate, ov.constant(np.float32(1))) if activation is F.silu else ov.gelu(gate, "tanh")
    down = ov.matmul(ov.multiply(gate, up), ov.constant(weights[2]), False, True)
    told = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": str(threads)}
    if threads % 2 == 0 and len(os.sched_getaffinity(0)) > 1:
        assert halves.compiled(openvino.Model([down], [x]), told)
        return
    with pytest.raises(EngineError, match="pairs of threads, and there are 1"):
        halves.compiled(openvino.Model([down], [x]), told)


def _names(model: Any) -> set[str]:
    return {op.get_friendly_name() for op in model.get_ops()}

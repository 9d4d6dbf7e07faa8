"""Sizes that vary: verified at their least and largest, 0 and 1 included, and refused outside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.engines import OnnxRuntime, Program
from intarsia.errors import InputError
from intarsia.network import Network

ENGINES = ["onnxruntime", "openvino"]


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.embed(ids))
        return self.head(x.reshape(-1, 8)).reshape(ids.shape[0], ids.shape[1], 4).softmax(-1)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranges_by_input(engine: str) -> None:
    model = Pool().eval()
    ids = intarsia.Input(
        min_shape=(1, 1), opt_shape=(2, 6), max_shape=(4, 12), dtype=torch.int64, domain=(0, 20)
    )
    fast = intarsia.compile(model, (ids,), engines=[engine], min_block_size=1)
    for shape in ((1, 1), (2, 6), (1, 12), (4, 1), (4, 12)):
        x = torch.randint(0, 20, shape)
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="size 13 in dimension 1; compiled for 1 to 12"):
        fast(torch.randint(0, 20, (2, 13)))


@pytest.mark.parametrize(
    ("rows", "allowed"),
    [
        (torch.export.Dim("rows", max=4), "0 to 4"),
        (torch.export.Dim("rows", min=9), "9 or more"),
        (torch.export.Dim.DYNAMIC(max=4), "0 to 4"),
    ],
)
def test_an_example_outside_its_own_range_is_refused(rows: Any, allowed: str) -> None:
    with pytest.raises(InputError, match=f"size 8 in dimension 0 of input, where .* {allowed}"):
        intarsia.compile(nn.ReLU(), (torch.randn(8, 4),), dynamic_shapes={"input": {0: rows}})


def test_a_range_without_an_end_is_named_in_words() -> None:
    rows = torch.export.Dim("rows", min=2)
    fast = intarsia.compile(nn.ReLU(), (torch.randn(8, 4),), dynamic_shapes={"input": {0: rows}})
    with pytest.raises(InputError, match="size 1 in dimension 0; compiled for 2 or more"):
        fast(torch.randn(1, 4))


@dataclass(frozen=True)
class WrongWhenLarge(OnnxRuntime):
    """ONNX Runtime, were it wrong at sizes that the example does not have."""

    name: ClassVar[str] = "wrong_when_large"

    def build(self, net: Network) -> Program:
        program = super().build(net)
        return lambda *xs: tuple(y + (y.shape[0] > 6) for y in program(*xs))


def test_every_corner_is_tried() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    rows = torch.export.Dim("rows", min=2, max=8)
    fast = intarsia.compile(
        model,
        (torch.randn(3, 4),),
        dynamic_shapes=({0: rows},),
        engines=[WrongWhenLarge()],
        min_block_size=1,
    )
    x = torch.randn(8, 4)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert "answers wrongly" in str(fast.plan)


class NeedsTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).reshape(-1, 4).max(0).values


def test_a_size_pytorch_cannot_run_is_told() -> None:
    rows = intarsia.Input(min_shape=(0, 4), opt_shape=(3, 4), max_shape=(6, 4))
    fast = intarsia.compile(NeedsTwo(), (rows,), engines=["onnxruntime"], min_block_size=1)
    x = torch.randn(5, 4)
    torch.testing.assert_close(fast(x), NeedsTwo()(x))
    assert any("not verified at (0, 4), where PyTorch itself fails" in note for note in fast.notes)


def test_a_size_that_the_model_fixes_is_told() -> None:
    class Fixes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for step in range(x.shape[1]):  # a loop over it is unrolled
                x = x + step
            return x

    auto = torch.export.Dim.AUTO
    fast = intarsia.compile(Fixes(), (torch.randn(3, 4),), dynamic_shapes=({0: auto, 1: auto},))
    x = torch.randn(5, 4)
    torch.testing.assert_close(fast(x), Fixes()(x))
    with pytest.raises(InputError, match="input x has size 6 in dimension 1; compiled for 4"):
        fast(torch.randn(5, 6))


@pytest.mark.parametrize("engine", ENGINES)
def test_attention_stays_on_its_engine_where_a_batch_may_be_empty(engine: str) -> None:
    class Attends(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k) + 1.0

    def some(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 2, 5, 8), torch.randn(batch, 2, 5, 8)

    batch = torch.export.Dim("batch", min=0, max=16)
    fast = intarsia.compile(
        Attends(), some(3), engines=[engine], dynamic_shapes=({0: batch}, {0: batch}), min_block_size=1
    )
    assert [segment.engine for segment in fast.plan.segments] == [engine]
    for size in (1, 3, 0, 16):
        inputs = some(size)
        torch.testing.assert_close(fast(*inputs), Attends()(*inputs), rtol=1e-5, atol=1e-5)
    if engine == "onnxruntime":
        assert any("leaves calls without elements to PyTorch" in note for note in fast.notes)


@pytest.mark.parametrize(
    "dim", [torch.export.Dim.AUTO, torch.export.Dim("batch", max=64)], ids=["auto", "named"]
)
def test_an_example_of_one_does_not_narrow_the_range(dim: Any) -> None:
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], image_size=32)
    model = transformers.ConvNextModel(config).eval()
    fast = intarsia.compile(model, (torch.randn(1, 3, 32, 32),), dynamic_shapes=({0: dim},))
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(fast(x)[0], model(x)[0], rtol=1e-4, atol=1e-5)


def test_a_model_that_wants_its_example_keeps_it() -> None:
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(1, -1) * 2.0 if x.shape[0] <= 1 else x.sum(0)

    fast = intarsia.compile(One(), (torch.randn(1, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    x = torch.randn(1, 4)
    torch.testing.assert_close(fast(x), One()(x))


def test_no_answer_without_elements_settles_a_guard() -> None:
    class Apart(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0 if x.shape[0] > 1 else x * 3.0

    batch = torch.export.Dim("batch", max=64)
    fast = intarsia.compile(Apart(), (torch.randn(4, 5),), dynamic_shapes=({0: batch},))
    x = torch.randn(6, 5)
    torch.testing.assert_close(fast(x), Apart()(x))
    with pytest.raises(InputError, match=r"the call does not meet x.shape\[0\] > 1"):
        fast(torch.randn(1, 5))


def test_a_model_does_not_run_at_sizes_that_nobody_asked_for() -> None:
    """Attention over 0 heads divides by their number in some versions of PyTorch, and ends the process."""

    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting():
                ran.append(x.shape[0])
            heads = x.unsqueeze(0).expand(2, *x.shape)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    ran: list[int] = []
    model = Heads()
    fast = intarsia.compile(
        model,
        (torch.randn(3, 4, 1),),
        dynamic_shapes=({0: torch.export.Dim("heads", min=1, max=8)},),
        min_block_size=1,
    )
    assert ran and 0 not in ran
    for heads in (1, 2, 8):
        x = torch.randn(heads, 4, 1)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="size 0"):
        fast(torch.randn(0, 4, 1))


class Scaled(nn.Module):
    """An integer scales, offsets and decides."""

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return x * step + 1 if step >= 0 else x


def test_an_integer_that_varies(tmp_path: Path) -> None:
    model, x = Scaled(), torch.randn(2, 8)
    options = {"engines": ["onnxruntime"], "min_block_size": 1}
    fixed = intarsia.compile(model, (x, 3), dynamic_shapes=(None, None), **options)
    with pytest.raises(InputError, match="input step is 4; compiled for 3; to let it vary"):
        fixed(x, 4)
    fast = intarsia.compile(model, (x, 3), dynamic_shapes=(None, Dim.DYNAMIC), **options)
    intarsia.save(fast, tmp_path / "scaled.intarsia")
    for module in (fast, intarsia.load(tmp_path / "scaled.intarsia")):
        for step in (3, 0, 1, 900):
            torch.testing.assert_close(module(x, step), model(x, step))
        for step, shown in ((2.5, "2.5"), (True, "True"), (torch.tensor(3), "a tensor"), ("3", "'3'")):
            with pytest.raises(InputError, match=f"input step must be an integer, not {shown}"):
                module(x, step)
        with pytest.raises(InputError, match="does not meet step >= 0"):
            module(x, -1)

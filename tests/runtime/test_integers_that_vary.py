"""Integer arguments: any value where a model uses one as a number; as compiled where it needs that value."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.errors import InputError
from intarsia.serve.interface import Interface

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Uses(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(8, 8), use

    def forward(self, x: torch.Tensor, n: Any = 7) -> Any:
        return self.use(self.layer(x), n)


def compiled(use: Callable[[torch.Tensor, Any], Any], n: Any = 7, **options: Any) -> tuple[nn.Module, Any]:
    model = Uses(use).eval()
    fast = intarsia.compile(model, (X, n), engines=["onnxruntime"], min_block_size=1, **options)
    torch.testing.assert_close(fast(X, n), model(X, n), rtol=1e-5, atol=1e-5)
    return model, fast


def same(model: nn.Module, fast: Any, *values: Any) -> None:
    for n in values:
        expected = model(X, n)
        largest = float(expected.nan_to_num(posinf=0, neginf=0).abs().max())
        torch.testing.assert_close(fast(X, n), expected, rtol=1e-5, atol=1e-6 * largest, equal_nan=True)


NUMBERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "product": lambda y, n: y * n,
    "sum": lambda y, n: 2 + n + y,
    "quotient": lambda y, n: y / n,
    "timestep": lambda y, n: torch.sin(torch.tensor([n]) * 0.01) + y,
    "steps": lambda y, n: y * (n // 3) + n % 4,
    "least": lambda y, n: y * max(n, 20),
    "magnitude": lambda y, n: y * abs(n),
    "comparison": lambda y, n: torch.where(y * 10 > n, y, -y),
    "full": lambda y, n: torch.full((4, 1), n) + y,
}


@pytest.mark.parametrize("use", NUMBERS.values(), ids=NUMBERS)
def test_a_number_has_any_value(use: Callable[[torch.Tensor, Any], Any]) -> None:
    model, fast = compiled(use)
    same(model, fast, 7, 0, 1, 2, 19, 21, -4, 2**24 + 1, 2**33 + 5)
    assert fast.plan.engines == ("onnxruntime",) and len(fast.plan) == 1
    for value in (True, 7.0, None, torch.tensor(7)):
        with pytest.raises(InputError, match="input n must be an integer"):
            fast(X, value)


FIXED: dict[str, tuple[Callable[[torch.Tensor, Any], Any], int]] = {
    "size": (lambda y, n: y.new_zeros(n) + n, 7),
    "cut": (lambda y, n: y[:, :n], 3),
    "index": (lambda y, n: y[:, n], 3),
    "shift": (lambda y, n: torch.roll(y, n, 0), 3),
    "loop": (lambda y, n: sum((y * i for i in range(n)), y), 3),
    "dimension": (lambda y, n: y.unsqueeze(0).sum(n), 2),
    "power": (lambda y, n: y**n, 2),
    "Python": (lambda y, n: y * math.log(n), 7),
    "name": (lambda y, n: y * {7: 2.0, 8: 3.0}[n], 7),
    "type": (lambda y, n: y * n if isinstance(n, int) else y + n, 7),
    "zero": (lambda y, n: y + n, 0),
    "one": (lambda y, n: y * n, 1),
    "negative": (lambda y, n: y * n, -5),
}


@pytest.mark.parametrize(("use", "value"), FIXED.values(), ids=FIXED)
def test_an_integer_that_is_no_number_stays(use: Callable[[torch.Tensor, Any], Any], value: int) -> None:
    _, fast = compiled(use, value)
    with pytest.raises(InputError, match=f"input n is {value + 1}; compiled for {value}; to let it vary"):
        fast(X, value + 1)
    assert fast.plan.engines == ("onnxruntime",)


def test_a_flag_stays_on_its_side() -> None:
    model, fast = compiled(lambda y, n: y * n if n > 3 else y - n)
    same(model, fast, 4, 100)
    with pytest.raises(InputError, match="the call does not meet n > 3"):
        fast(X, 3)
    model, fast = compiled(lambda y, n: y * n if n % 2 == 0 else y - n)
    same(model, fast, 9, 101)
    with pytest.raises(InputError, match="the call does not meet n % 2 != 0"):
        fast(X, 8)


def test_a_float_is_the_one_that_was_compiled() -> None:
    """A quotient by -0.0 is not one by 0.0. NaN may be another object, as after loading."""
    for value, other in ((0.0, -0.0), (math.nan, 0.0)):
        fast = intarsia.compile(Uses(NUMBERS["quotient"]).eval(), (X, value), engines="pytorch")
        fast(X, float(str(value)))
        with pytest.raises(InputError, match=f"input n is {other}; compiled for {value}"):
            fast(X, other)


def test_booleans_and_models_without_verification_stay() -> None:
    _, fast = compiled(lambda y, n: y * 2 if n else y, True)
    with pytest.raises(InputError, match="input n is False; compiled for True"):
        fast(X, False)
    _, fast = compiled(NUMBERS["product"], verify=False)
    with pytest.raises(InputError, match="input n is 8; compiled for 7"):
        fast(X, 8)


def test_what_dynamic_shapes_says_holds() -> None:
    _, fast = compiled(NUMBERS["product"], dynamic_shapes=({0: Dim("rows", min=2, max=8)}, None))
    with pytest.raises(InputError, match="input n is 8; compiled for 7"):
        fast(X, 8)


def test_names_defaults_and_files(tmp_path: Path) -> None:
    model = Uses(NUMBERS["product"]).eval()
    fast = intarsia.compile(model, (X,), {"n": 5}, engines=["onnxruntime"], min_block_size=1)
    intarsia.save(fast, tmp_path / "model.intarsia")
    for one in (fast, intarsia.load(tmp_path / "model.intarsia")):
        torch.testing.assert_close(one(X, n=9), model(X, n=9), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one(X), model(X), rtol=1e-5, atol=1e-5)
        other = Uses(NUMBERS["product"]).eval()
        one.refit(other.state_dict())
        torch.testing.assert_close(one(X, n=9), other(X, n=9), rtol=1e-5, atol=1e-5)


def test_a_server_keeps_the_number_of_the_example() -> None:
    model, fast = compiled(NUMBERS["product"])
    answer = Interface.of(fast).call({"x": X})["output"]
    torch.testing.assert_close(answer, model(X, 7).detach(), rtol=1e-5, atol=1e-5)


def test_a_model_that_changes_itself_keeps_its_number() -> None:
    class Counts(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            self.calls.add_(1)
            return x * n + self.calls

    model = Counts().eval()
    fast = intarsia.compile(model, (X, 7), engines=["onnxruntime"], min_block_size=1)
    assert model.calls == 0
    torch.testing.assert_close(fast(X, 7), X * 7 + 1)
    with pytest.raises(InputError, match="input n is 8; compiled for 7"):
        fast(X, 8)


def test_one_program_for_all_timesteps_of_a_unet() -> None:
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    x = torch.randn(1, 3, 8, 8)
    fast = intarsia.compile(unet, (x, 10), engines=["onnxruntime"])
    for timestep in (10, 0, 1, 999):
        with torch.no_grad():
            expected = unet(x, timestep).sample
        torch.testing.assert_close(fast(x, timestep).sample, expected, rtol=1e-4, atol=1e-5)
    assert fast.plan.engines == ("onnxruntime",)

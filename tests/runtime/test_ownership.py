"""Memory: what a compiled module returns is the caller's; aliasing is as in eager, or a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError, StaleWeightsError

ENGINES = ["onnxruntime", "openvino", "pytorch"]


def compiled(model: nn.Module, *args: Any, engine: str) -> Any:
    return intarsia.compile(model.eval(), args, engines=[engine], min_block_size=1)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> Any:
        folded = self.weight * 2
        return x * folded, folded, folded.view(-1)


@pytest.mark.parametrize("engine", ENGINES)
def test_constants_handed_out_are_copies(engine: str) -> None:
    model, x = Constants(), torch.randn(3)
    fast = compiled(model, x, engine=engine)
    expected = [t.detach().clone() for t in model(x)]
    for result in fast(x):
        result.add_(1)
    for result, truth in zip(fast(x), expected, strict=True):
        torch.testing.assert_close(result, truth)


class Copies(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(x)
        return (
            x.to(torch.float32, copy=True),
            x.clone().view(-1),
            x.clone().detach(),
            y,
            y.clone(),
            x + 1,
            x + 1,
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_copies_are_copies_and_equal_work_is_not_shared(engine: str) -> None:
    x = torch.randn(4)
    kept = x.clone()
    results = compiled(Copies(), x, engine=engine)(x)
    expected = Copies()(kept)
    for number, result in enumerate(results):
        result.fill_(100.0 + number)
    torch.testing.assert_close(x, kept)
    assert [float(r[0]) for r in results] == [100.0 + n for n in range(len(results))]
    for result, truth in zip(compiled(Copies(), x, engine=engine)(x), expected, strict=True):
        torch.testing.assert_close(result, truth)


class Passes(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(x)
        return x, y, y, x.view(-1)


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_returned_and_one_tensor_twice(engine: str) -> None:
    x = torch.randn(2, 2)
    same, first, second, view = compiled(Passes(), x, engine=engine)(x)
    assert same is x
    assert first is second
    torch.testing.assert_close(view, x.view(-1))


class Writes(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_one_tensor_given_twice_where_one_is_written_is_refused(engine: str) -> None:
    a, b = torch.zeros(3), torch.zeros(3)
    fast = compiled(Writes(), a, b, engine=engine)
    assert fast(a.clone(), b).tolist() == [0, 0, 0]
    with pytest.raises(InputError, match="input a is written to by the model and shares memory with b"):
        fast(a, a)
    whole = torch.zeros(5)
    with pytest.raises(InputError, match="shares memory"):
        fast(whole[:3], whole[2:])
    whole = torch.zeros(6)
    assert fast(whole[:3], whole[3:]).tolist() == [0, 0, 0], "halves of one tensor are apart"
    assert whole.tolist() == [1, 1, 1, 0, 0, 0]


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("cache", torch.zeros(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        before = self.cache.to(torch.float32, copy=True)
        self.cache.add_(x)
        return (
            before,
            self.cache,
            x * 2,
            self.weight,
            self.weight.t(),
            self.cache[1:],
            self.passing,
            self.weight,
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_and_buffers_that_are_returned_are_the_models(engine: str) -> None:
    model, x = Returns().eval(), torch.ones(3)
    fast = compiled(model, x, engine=engine)
    before, cache, _, weight, turned, part, passing, again = fast(x)
    assert cache is model.cache and weight is model.weight and passing is model.passing and again is weight
    assert turned.data_ptr() == weight.data_ptr() and turned.stride() == model.weight.t().stride()
    assert part.data_ptr() == model.cache[1:].data_ptr()
    assert before.tolist() == [0, 0, 0] and cache.tolist() == [1, 1, 1]
    cache.fill_(7)
    before, *_ = fast(x)
    assert before.tolist() == [7, 7, 7] and cache.tolist() == [8, 8, 8]
    with torch.no_grad():
        turned.mul_(2)
    with pytest.raises(StaleWeightsError, match="weight of the model changed"):
        fast(x)
    fast.refit(model)
    torch.testing.assert_close(fast(x)[4], model.weight.t())


def test_a_module_that_was_loaded_returns_copies_of_its_weights(tmp_path: Path) -> None:
    model, x = Returns().eval(), torch.ones(3)
    intarsia.save(compiled(model, x, engine="onnxruntime"), tmp_path / "model.intarsia")
    loaded = intarsia.load(tmp_path / "model.intarsia")
    for _ in range(2):
        result = loaded(x)[3]
        torch.testing.assert_close(result, model.weight.detach())
        result.zero_()

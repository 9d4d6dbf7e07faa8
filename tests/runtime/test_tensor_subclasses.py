"""Models whose weights are no plain tensors: quantized by torchao, sparse, jagged, of an unknown class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import intarsia
from intarsia.errors import InputError, RefitError, StaleWeightsError

torchao = pytest.importorskip("torchao.quantization")

X = torch.linspace(-1, 1, 128).reshape(2, 64)


def quantized(config: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    torchao.quantize_(model, getattr(torchao, config)())
    return model


CONFIGS = [
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_quantized_model_answers_as_itself(config: str, engine: str) -> None:
    model = quantized(config)
    fast = intarsia.compile(model, (X,), engines=[engine], min_block_size=1, fallback="error")
    assert engine in fast.plan.engines
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=1e-4, atol=1e-5)
    assert list(fast.state_dict()) == list(model.state_dict())


def test_quantized_weights_that_require_gradients() -> None:
    """As transformers loads them; torch 2.13 lets the integers inside require gradients, too, and fails."""
    model = quantized("Int8WeightOnlyConfig")
    for name in ("0.weight", "2.weight"):
        model.get_parameter(name).requires_grad_()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1, fallback="error")
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=1e-4, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model.parameters())


def _copy(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.detach().clone())


def _inside(model: nn.Sequential) -> None:
    model[0].weight.scale.data.mul_(2)


def _inside_counted(model: nn.Sequential) -> None:
    model[0].weight.scale.mul_(2)


@pytest.mark.parametrize("change", [_copy, _inside, _inside_counted])
def test_changes_of_a_quantized_weight_are_noticed(change: Callable[[nn.Sequential], None]) -> None:
    model = quantized("Int8WeightOnlyConfig")
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    before = fast.weights_digest()
    change(model)
    with pytest.raises(StaleWeightsError, match=r"^0\.weight of the model changed"):
        fast(X)
    assert (fast.weights_digest() == before) is (change is _copy)


class _Int4(nn.Module):
    """The product of torchao's weights in 4 bits on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        integers = torch.randint(0, 16, (64, 64), dtype=torch.int32)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1))
        self.register_buffer("scales", torch.rand(2, 64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, 32, self.scales).relu()


def test_the_plan_says_that_weights_packed_by_torch_stay_there() -> None:
    model = _Int4().eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime", "openvino"], min_block_size=1)
    assert str(fast.plan).count("its weight in 4 bits is packed for PyTorch's own kernel") == 2
    torch.testing.assert_close(fast(X), model(X))


def test_a_quantized_weight_that_is_replaced_is_told() -> None:
    model = quantized("Int8WeightOnlyConfig")
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    model[0].weight = quantized("Int8WeightOnlyConfig", seed=1)[0].weight
    with pytest.warns(UserWarning, match=r"0\.weight of the model was replaced"):
        fast(X)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_quantized_model_takes_other_weights_is_saved_and_loaded(config: str, tmp_path: Path) -> None:
    fast = intarsia.compile(quantized(config), (X,), engines=["onnxruntime"], min_block_size=1)
    other = quantized(config, seed=1)
    fast.refit(other)
    torch.testing.assert_close(fast(X), other(X).detach(), rtol=1e-4, atol=1e-5)
    intarsia.save(fast, tmp_path / "model.intarsia")
    again = intarsia.load(tmp_path / "model.intarsia")
    torch.testing.assert_close(again(X), fast(X), rtol=0, atol=0)
    with pytest.raises(RefitError, match=r"a class that a file cannot hold"):
        again.refit(other)
    copied = copy.deepcopy(fast)
    torch.testing.assert_close(copied(X), fast(X), rtol=0, atol=0)


def test_a_build_of_a_quantized_model_is_kept_for_these_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    monkeypatch.setenv("INTARSIA_CACHE_GB", "1")
    monkeypatch.setattr("intarsia.compiler.build_cache.LEAST_S", 0.0)
    answers = []
    for seed in (0, 0, 1):
        model = quantized("Int8WeightOnlyConfig", seed)
        fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
        torch.testing.assert_close(fast(X), model(X).detach(), rtol=1e-4, atol=1e-5)
        answers.append(any("no engine was built" in note for note in fast.notes))
    assert answers == [False, True, False]


@torch.no_grad()
def test_a_quantized_model_is_tuned_and_compiled_by_torch() -> None:
    model = quantized("Int8WeightOnlyConfig")
    expected = model(X)
    fast = torch.compile(model, backend="intarsia", options={"min_block_size": 1})
    torch.testing.assert_close(fast(X), expected, rtol=1e-4, atol=1e-5)
    with intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1) as tuned:
        assert tuned.placed, tuned.left
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-5)
        model[0].weight.scale.mul_(2)
        with pytest.warns(UserWarning, match=r"0\.weight was written to"):
            model(X)


class _Doubled(torch.Tensor):
    """A subclass that says nothing of what it holds."""

    def __new__(cls, inner: torch.Tensor) -> _Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.detach.default:
            return _Doubled(args[0].inner)
        plain = pytree.tree_map(lambda x: x.inner * 2 if isinstance(x, _Doubled) else x, (args, kwargs or {}))
        return op(*plain[0], **plain[1])


class _WithDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_Doubled(torch.randn(64, 64)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_subclass_nobody_knows_runs_as_it_is_and_the_rest_is_compiled() -> None:
    model = nn.Sequential(_WithDoubled(), quantized("Int8WeightOnlyConfig")).eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    assert list(fast.parts) == ["1"]
    assert any("0.weight is a _Doubled, a subclass of Tensor without" in note for note in fast.notes)
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "mnn"])
def test_an_input_of_a_subclass_is_no_failure_of_the_engine(engine: str) -> None:
    model, x = nn.Linear(64, 64).eval(), torch.linspace(-1, 1, 128).reshape(2, 64)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    with pytest.warns(UserWarning, match=f"PyTorch runs this call in place of {engine}"):
        torch.testing.assert_close(fast(_Doubled(x)), model(2 * x).detach())
    torch.testing.assert_close(fast(x), model(x).detach())
    assert not any("failed at a call" in note for note in fast.notes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_input_is_a_sentence(layout: torch.layout) -> None:
    x = torch.zeros(2, 64)
    fast = intarsia.compile(nn.Linear(64, 64).eval(), (x,), engines="pytorch")
    with pytest.raises(InputError, match="input input is a nested tensor; compiled for a plain one"):
        fast(torch.nested.nested_tensor([x, x[:1]], layout=layout))


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(64).to_sparse())
        self.line = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(torch.sparse.mm(self.mix, x.T).T)


def test_a_sparse_buffer_works() -> None:
    model = _Sparse().eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=1e-4, atol=1e-5)
    assert not any("not verified" in note for note in fast.notes)
    model.mix.mul_(2)
    with pytest.raises(StaleWeightsError, match="mix of the model changed"):
        fast(X)


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)


class _Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", _jagged())
        self.line = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) + self.line(self.bias).values().sum()


@pytest.mark.parametrize(("model", "given"), [(_Jagged(), X), (nn.Linear(64, 64), _jagged())])
def test_nested_tensors_run_as_they_are(model: nn.Module, given: torch.Tensor) -> None:
    fast = intarsia.compile(model.eval(), (given,), engines=["onnxruntime"], min_block_size=1)
    assert any("a nested tensor, which no engine supports" in note for note in fast.notes)
    answer, expected = fast(given), model(given).detach()
    if expected.is_nested:
        answer, expected = answer.values(), expected.values()
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)

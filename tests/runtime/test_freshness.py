"""Weights, modules, hooks and attributes that change after compiling are noticed, however they change."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import intarsia
from intarsia.errors import StaleWeightsError
from intarsia.runtime.freshness import TURNS

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))).eval()


def fused_step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(X).sum().backward()
    optimizer.step()


def test_a_fused_step_is_not_counted_by_torch() -> None:
    """If torch counts it one day, the hook may go."""
    model = small()
    before = model[0].weight._version
    fused_step(model)
    assert model[0].weight._version == before


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
def test_a_compiled_module_notices_a_fused_step(engine: str) -> None:
    model = small()
    fast = intarsia.compile(model, (X,), engines=[engine], min_block_size=1)
    fast(X)
    fused_step(model)
    with pytest.raises(StaleWeightsError, match=r"0\.weight, 0\.bias, 2\.weight and 1 more .* changed"):
        fast(X)
    fast.refit(model)
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tuned_modules_notice_a_fused_step() -> None:
    model = small()
    with intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1) as tuned:
        assert tuned.placed
        with torch.enable_grad():
            model.train()
            fused_step(model)
            model.eval()
        with pytest.warns(UserWarning, match="was written to"):
            answer = model(X)
    assert torch.equal(answer, model(X))


def test_the_backend_notices_fused_steps() -> None:
    model = small()
    fast = torch.compile(model, backend="intarsia", options={"min_block_size": 1})
    for _ in range(6):  # after four changes the weights are inputs
        with torch.no_grad():
            torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)
        fused_step(model)


def test_an_optimizer_that_leaves_the_weights_alone_changes_nothing() -> None:
    backbone, head = small(), nn.Linear(8, 2)
    fast = intarsia.compile(backbone, (X,), engines=["onnxruntime"], min_block_size=1)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], fused=True)
    with torch.no_grad():
        features = backbone(X)
    head(features).sum().backward()
    optimizer.step()
    torch.testing.assert_close(fast(X), features, rtol=1e-5, atol=1e-6)


def _data(weight: torch.Tensor) -> None:
    weight.data.mul_(1.5)


def _numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[...] += 1


def _a_row(weight: torch.Tensor) -> None:
    weight.data[3] = 0.25


@pytest.mark.parametrize("place", [0, 25, 49])
@pytest.mark.parametrize("write", [_data, _numpy, _a_row])
def test_a_write_that_torch_does_not_count_is_noticed_within_eight_calls(
    write: Callable[[torch.Tensor], None], place: int
) -> None:
    model = deep()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1, verify=False)
    for _ in range(5):
        fast(X)
    write(model[place].weight)
    with pytest.raises(StaleWeightsError, match=rf"^{place}\.weight of the model changed"):
        _ = [fast(X) for _ in range(TURNS)]


def test_a_write_that_was_noticed_stays_an_error() -> None:
    model = deep()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1, verify=False)
    _data(model[25].weight)
    with pytest.raises(StaleWeightsError):
        _ = [fast(X) for _ in range(TURNS)]
    for _ in range(TURNS):
        with pytest.raises(StaleWeightsError, match=r"^25\.weight of the model changed"):
            fast(X)


@pytest.mark.parametrize("write", [_data, _numpy])
def test_a_write_to_a_large_weight_is_noticed_in_few_places(write: Callable[[torch.Tensor], None]) -> None:
    """Of weights that a file holds, each place that is read takes 64 KB of memory."""
    model, x = nn.Linear(512, 512), torch.randn(1, 512)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1, verify=False)
    fast(x)
    write(model.weight)
    with pytest.raises(StaleWeightsError, match=r"^weight of the model changed"):
        _ = [fast(x) for _ in range(TURNS)]


@torch.no_grad()
def test_tuned_modules_and_the_backend_notice_writes_through_data() -> None:
    model = small()
    fast = torch.compile(model, backend="intarsia", options={"min_block_size": 1})
    fast(X)
    model[0].weight.data.mul_(1.5)
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-6)
    with intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1):
        model[0].weight.data.mul_(1.5)
        with pytest.warns(UserWarning, match=r"0\.weight was written to"):
            answer = model(X)
    assert torch.equal(answer, model(X))


def test_what_was_written_to_is_not_saved(tmp_path: Any) -> None:
    model = deep()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1, verify=False)
    model[49].weight.data.mul_(1.5)
    with pytest.raises(StaleWeightsError, match=r"^49\.weight of the model changed"):
        intarsia.save(fast, tmp_path / "model.intarsia")


def _replace_first(model: nn.Sequential) -> None:
    model[0] = nn.Linear(8, 8)


def _append(model: nn.Sequential) -> None:
    model.append(nn.ReLU())


def _hook(model: nn.Sequential) -> None:
    model[2].register_forward_hook(lambda _, __, result: result + 1)


def _own_hook(model: nn.Sequential) -> None:
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def _attribute(model: nn.Sequential) -> None:
    model[1].inplace = True


def _forward(model: nn.Sequential) -> None:
    model[1].forward = torch.tanh


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_replace_first, "the model itself has other modules than when it was compiled"),
        (_append, "the model itself has other modules than when it was compiled"),
        (_hook, "2 has a hook that was added after compiling"),
        (_own_hook, "the model itself has a hook that was added after compiling"),
        (_attribute, "1.inplace has another value than when it was compiled"),
        (_forward, "1.forward has another value than when it was compiled"),
    ],
)
def test_a_model_that_is_built_otherwise_is_told_once(
    change: Callable[[nn.Sequential], None], sentence: str
) -> None:
    model = small()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    before = fast(X).clone()
    change(model)
    with pytest.warns(UserWarning, match=f"after compiling: {sentence}; the compiled module continues"):
        assert torch.equal(fast(X), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(X), before)


class _Adapted(nn.Linear):
    """A layer with an adapter. The names of its switches are those of peft."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.adapters = nn.ModuleDict({"default": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
        self._disable_adapters, self._active_adapter = False, ["default"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = [] if self._disable_adapters else [self.adapters[name](x) for name in self._active_adapter]
        return sum(added, super().forward(x))


@pytest.mark.parametrize(("name", "value"), [("_disable_adapters", True), ("_active_adapter", ["other"])])
def test_a_switch_of_an_adapter_is_noticed(name: str, value: object) -> None:
    model = nn.Sequential(_Adapted(), nn.ReLU()).eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    setattr(model[0], name, value)
    with pytest.warns(UserWarning, match=f"0.{name} has another value than when it was compiled"):
        _ = [fast(X) for _ in range(TURNS)]


def test_one_of_many_modules_replaced_is_told_within_eight_calls() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(50))).eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1, verify=False)
    fast(X)
    model[40][0] = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match="40 has other modules"):
        _ = [fast(X) for _ in range(TURNS)]


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("quiet")
def test_runs_modes_and_gradients_are_no_changes() -> None:
    model = small()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    before = fast(X).clone()
    model.train()
    model(X).sum().backward()
    model.requires_grad_(False)
    for _ in range(TURNS):
        assert torch.equal(fast(X), before)


def test_the_model_is_not_kept_alive() -> None:
    model = small()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    before, gone = fast(X).clone(), [weakref.ref(model), weakref.ref(model[0])]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    for _ in range(TURNS):
        assert torch.equal(fast(X), before)


def test_optimizers_have_one_hook_however_many_modules_there_are() -> None:
    hooks = torch_optimizer._global_optimizer_post_hooks
    intarsia.compile(small(), (X,), verify=False)
    before = len(hooks)
    intarsia.compile(small(), (X,), verify=False)
    assert len(hooks) == before

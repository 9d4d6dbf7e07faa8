"""torch.func over compiled modules: refused in a sentence, or answered by the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError

X = torch.linspace(-1, 1, 40).reshape(5, 8)


def test_torch_tells_of_transforms_where_we_ask() -> None:
    """It has no public name: this is the guard of the one place that asks."""
    seen = []
    torch.func.vmap(lambda x: (seen.append(torch._C._functorch.peek_interpreter_stack()), x)[1])(X)
    assert seen[0] is not None and torch._C._functorch.peek_interpreter_stack() is None


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.func.vmap(f)(X[None]),
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        lambda f: torch.func.jvp(f, (X,), (X,)),
        lambda f: torch.func.jacrev(f)(X),
    ],
)
def test_a_compiled_module_says_what_to_transform(transformed: Callable[[Any], Any], engine: str) -> None:
    fast = intarsia.compile(nn.Linear(8, 8).eval(), (X,), engines=[engine], min_block_size=1)
    with pytest.raises(InputError, match="transform the original model"):
        transformed(fast)


def test_weights_set_by_name_are_refused() -> None:
    """`functional_call` sets attributes. It would set a weight that no engine reads."""
    model = nn.Linear(8, 8).eval()
    weights = {name: 2 * weight for name, weight in model.named_parameters()}
    fast = intarsia.compile(model, (X,), engines="pytorch")
    with pytest.raises(InputError, match="no 'weight': its weights are frozen"):
        torch.func.functional_call(fast, weights, (X,))
    torch.testing.assert_close(fast(X), model(X).detach())
    inside = intarsia.compile(nn.Sequential(model).eval(), (X,), engines="pytorch")
    with pytest.raises(AttributeError) as error:
        torch.func.functional_call(inside, {f"0.{name}": value for name, value in weights.items()}, (X,))
    assert "use the model itself, also for torch.func.functional_call" in str(error.value.__cause__)
    assert not hasattr(inside, "0") and not hasattr(fast, "weight")


class _Steps(nn.Module):
    """Not captured whole: it decides on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, most: float = 1e9) -> torch.Tensor:
        y = self.layers(x)
        return y if _is_small(y, most) else y * 0


def _is_small(y: torch.Tensor, most: float) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(y):
        y = torch._C._functorch.get_unwrapped(y)
    return bool(y.abs().max().item() < most)


@torch.no_grad()
def test_parts_run_in_pytorch_where_they_are_transformed() -> None:
    model = _Steps().eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    assert list(fast.parts) == ["layers"]
    expected = torch.func.vmap(model)(torch.stack([X, 2 * X]))
    with pytest.warns(UserWarning, match="layers runs in PyTorch for this call: it runs on engines"):
        answer = torch.func.vmap(fast)(torch.stack([X, 2 * X]))
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("assign", [False, True])
def test_parts_run_in_pytorch_with_weights_set_by_name(assign: bool) -> None:
    """For that call, or from then on: the programs have the weights that were compiled."""
    model = _Steps().eval()
    weights = {name: 2 * weight for name, weight in model.named_parameters()}
    expected = torch.func.functional_call(model, weights, (X,))
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    others = {f"model.{name}": weight for name, weight in weights.items()}
    if assign:
        fast.load_state_dict(others, assign=True)
    with pytest.warns(UserWarning, match=r"layers runs in PyTorch for this call: 0\.weight.* was replaced"):
        answer = fast(X) if assign else torch.func.functional_call(fast, others, (X,))
    torch.testing.assert_close(answer, expected)
    torch.testing.assert_close(fast(X), expected if assign else model(X), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_tuned_modules_run_in_pytorch_where_they_are_transformed() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    expected = torch.func.vmap(model)(torch.stack([X, 2 * X]))
    with (
        intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1),
        pytest.warns(UserWarning, match="runs in PyTorch for this call"),
    ):
        answer = torch.func.vmap(model)(torch.stack([X, 2 * X]))
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
def test_torch_compile_runs_a_compiled_module_as_it_is(engine: str) -> None:
    model = nn.Linear(8, 8).eval()
    fast = intarsia.compile(model, (X,), engines=[engine], min_block_size=1)
    around = torch.compile(nn.Sequential(fast, nn.ReLU()), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(around(X), model(X).relu())

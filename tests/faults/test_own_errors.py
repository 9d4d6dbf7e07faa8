"""An error of ours never ends a compile: the model runs as it is, with a warning."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia import Measured
from intarsia.capture.example import is_transformed
from intarsia.errors import CaptureError, InputError

job = importlib.import_module("intarsia.compiler.job")
entry = importlib.import_module("intarsia.compiler.entry")
X = torch.linspace(-1, 1, 20).reshape(4, 5)

# A function that each stage calls, in the job or beside it, and options that lead through the stage.
STAGES: list[tuple[str, str, dict[str, Any]]] = [
    ("prepare", "resolve_engines", {}),
    ("capture", "Judge", {}),
    ("lower", "lower_model", {}),
    ("cache_entry", "cache_entry", {}),
    ("check", "faithful_lowering", {}),
    ("support", "support_table", {}),
    ("build", "assembler.rewriter", {}),
    ("build", "assembler.Compiled", {}),
    ("choose", "choose", {"partition": Measured(budget_s=1)}),
    ("verify", "whole_fault", {}),
    ("store", "CacheEntry.store", {}),
    ("finish", "Refit", {}),
]


class Boom(Exception):
    pass


def boom(*args: Any, **kwargs: Any) -> Any:
    raise Boom("it fell over")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh()).eval()


@pytest.mark.parametrize(("stage", "function", "options"), STAGES)
def test_an_unexpected_error_of_any_stage(
    stage: str, function: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    place = function if function.startswith("assembler.") else f"job.{function}"
    monkeypatch.setattr(f"intarsia.compiler.{place}", boom)
    where = rf"unexpected error in stage '{stage}' at intarsia/\S+\.py:\d+: Boom: it fell over"
    with pytest.warns(UserWarning, match=where) as caught:
        fast = intarsia.compile(model, (X,), **options)
    assert caught[0].filename == __file__
    assert torch.equal(fast(X), model(X))
    assert not fast(X).requires_grad and fast.plan.engines == ("pytorch",)
    assert any(re.search(where, note) for note in fast.notes)
    for strict in ({"fallback": "error"}, {"require_full_compilation": True}):
        with pytest.raises(Boom, match="it fell over"):
            intarsia.compile(model, (X,), **options, **strict)


def test_an_unexpected_error_where_training_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "training_difference", boom)
    model = net()
    with pytest.warns(UserWarning, match="where training is compared with evaluation: .*Boom: it fell over"):
        fast = intarsia.compile(model, (X,))
    torch.testing.assert_close(fast(X), model(X).detach())
    with pytest.raises(Boom, match="it fell over"):
        intarsia.compile(model, (X,), fallback="error")


class Branches(nn.Module):
    """A model that is compiled in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 64), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y + 1 if y.sum() > 0 else y)


def test_an_unexpected_error_while_parts_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Branches().eval()
    with monkeypatch.context() as patch:
        patch.setattr(entry, "compile_parts", boom)
        with pytest.warns(UserWarning, match="stage 'in_parts' .*Boom"):
            fast = intarsia.compile(model, (X,))
    assert torch.equal(fast(X), model(X))
    monkeypatch.setattr(job, "support_table", boom)
    with pytest.warns(
        UserWarning, match="first runs as it is, in PyTorch: unexpected error in stage 'support'"
    ):
        fast = intarsia.compile(model, (X,))
    assert torch.equal(fast(X), model(X))
    assert any(note.startswith("first runs as it is") and "Boom" in note for note in fast.notes)


def test_torch_compile_and_tune_go_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net().requires_grad_(False)
    monkeypatch.setattr(job, "support_table", boom)
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="this graph runs in PyTorch.*stage 'support'.*Boom"):
        torch.testing.assert_close(torch.compile(model, backend="intarsia")(X), model(X))
    with pytest.warns(UserWarning, match="stage 'support'.*Boom"):
        tuned = intarsia.tune(model, lambda: model(X))
    torch.testing.assert_close(model(X), net().eval().requires_grad_(False)(X) * 0 + model(X))
    assert "Boom" in str(tuned)


def test_errors_of_the_user_are_still_raised() -> None:
    with pytest.raises(InputError, match="needs a model on a CUDA device"):
        intarsia.compile(net(), (X,), cuda_graphs=True)
    with pytest.raises(CaptureError, match="fails on the example itself"):
        intarsia.compile(net(), (X[:, :3],))


class Derivative(nn.Module):
    def __init__(self, transform: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.transform = nn.Linear(5, 5), transform

    def forward(self, x: torch.Tensor) -> Any:
        return self.transform(lambda y: torch.tanh(self.layer(y)).sum())(x)


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_transforms_of_torch_func_inside_a_forward(name: str) -> None:
    model = Derivative(getattr(torch.func, name)).eval()
    fast = intarsia.compile(model, (X,))
    torch.testing.assert_close(fast(X), model(X).detach())


def test_lazy_modules_get_their_weights() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d()).eval()
    fast = intarsia.compile(model, (X,))
    assert any("0, 2 had no weights yet" in note for note in fast.notes)
    torch.testing.assert_close(fast(X), model(X).detach())


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.adjacency, x).relu()


def test_sparse_buffers_and_nested_tensors() -> None:
    model = Graph().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast = intarsia.compile(model, (X,))
    torch.testing.assert_close(fast(X), model(X))
    assert not any("not verified" in note for note in fast.notes)
    ragged = torch.nested.nested_tensor([X[:2], X[:3]], layout=torch.jagged)
    linear = nn.Linear(5, 5).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast = intarsia.compile(linear, (ragged,))
    assert any("nested tensor" in note for note in fast.notes)
    torch.testing.assert_close(fast(ragged).values(), linear(ragged).values().detach())


def test_torch_still_tells_the_tensors_of_a_transform() -> None:
    seen: list[bool] = []
    torch.func.grad(lambda x: [seen.append(is_transformed(((x,), {}))), x.sum()][1])(X)
    assert seen == [True] and not is_transformed(((X,), {}))

"""`torch.compile(backend="intarsia")`: the just-in-time door."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from intarsia.backend import GraphReport, intarsia_backend, reports

EVERYTHING = {"min_block_size": 1}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    reports(clear=True)
    yield
    torch._dynamo.reset()


def compiled(model: Any, options: dict[str, Any] | None = None, **rest: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=intarsia_backend, options={**EVERYTHING, **(options or {})}, **rest)


def agree(fast: Callable[..., Any], model: Callable[..., Any], *args: Any, off: float = 1e-5) -> None:
    torch.testing.assert_close(fast(*args), model(*args), rtol=off, atol=off)


def only() -> GraphReport:
    (report,) = reports()
    return report


class Net(nn.Module):
    """Products, a norm with buffers, and activations."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(torch.relu(self.norm(self.up(x)))))


class Branches(nn.Module):
    """Data decides the way, so that export fails and Dynamo makes two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if y.sum() > 0:
            return torch.relu(self.down(y))
        return torch.tanh(self.down(y))


@torch.no_grad()
def test_a_model_that_cannot_be_exported_still_compiles() -> None:
    model = Branches().eval()
    fast = compiled(model, dynamic=False)
    for _ in range(4):
        agree(fast, model, torch.randn(3, 8))
    assert len(reports()) >= 2 and all(report.share == 1.0 for report in reports())


@pytest.mark.skipif(not list(distributions(name="intarsia")), reason="intarsia is not installed")
def test_the_name_is_known_to_torch() -> None:
    assert "intarsia" in torch.compiler.list_backends()


@torch.no_grad()
def test_weights_are_constants_and_are_frozen_anew_when_they_change() -> None:
    model, x = Net().eval(), torch.randn(3, 8)
    fast = compiled(model, dynamic=False)
    agree(fast, model, x)
    agree(fast, model, x)
    assert only().programs == 1
    model.up.weight.mul_(2)
    agree(fast, model, x)
    model.down.weight = nn.Parameter(torch.randn(8, 8))
    agree(fast, model, x)
    model.down.bias.data = torch.randn(8)
    agree(fast, model, x)
    assert model.norm.running_mean is not None
    model.norm.running_mean.add_(1)
    agree(fast, model, x)
    assert only().programs == 5 and only().share == 1.0


@torch.no_grad()
def test_weights_that_keep_changing_become_inputs() -> None:
    model, x = Net().eval(), torch.randn(3, 8)
    fast = compiled(model, dynamic=False)
    for _ in range(8):
        agree(fast, model, x)
        model.up.weight.mul_(1.1)
    assert only().programs == 5
    assert any("_parameters['weight'] changed 4 times" in note for note in only().notes)


def test_weights_made_in_inference_mode_are_inputs() -> None:
    with torch.inference_mode():
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(3, 8)
        fast = compiled(model, dynamic=False)
        agree(fast, model, x)
        model[0].weight.mul_(2)  # type: ignore[operator,union-attr]
        agree(fast, model, x)
    assert any("created in inference mode" in note for note in only().notes) and only().programs == 1


@torch.no_grad()
def test_a_tensor_that_the_model_replaces_at_every_call() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.state = nn.Linear(8, 8), torch.zeros(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = self.state * 0.5 + self.line(x)
            return self.state

    model, twin = Keeps().eval(), Keeps().eval()
    twin.load_state_dict(model.state_dict())
    fast = compiled(model, dynamic=False)
    for x in torch.randn(8, 2, 8):
        agree(fast, twin, x)
    assert only().programs == 5 and only().share == 1.0


@torch.no_grad()
def test_modules_of_one_class_share_a_graph_and_not_its_weights() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval() for _ in range(3)]
    fast = [compiled(layer, dynamic=False) for layer in layers]
    x = torch.randn(2, 8)
    for _ in range(2):
        for quick, layer in zip(fast, layers, strict=True):
            agree(quick, layer, x)
    assert sum(report.programs for report in reports()) == 3


@torch.no_grad()
def test_a_program_goes_with_its_weights() -> None:
    def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(x))

    fast, x = compiled(run, dynamic=False), torch.randn(2, 8)
    for _ in range(6):
        layer = nn.Linear(8, 8)
        torch.testing.assert_close(fast(layer, x), run(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_sizes_that_vary_are_compiled_for(dynamic: bool | None) -> None:
    model = Net().eval()
    fast = compiled(model, dynamic=dynamic)
    for size in (3, 5, 9, 4, 40):
        agree(fast, model, torch.randn(size, 8))
    last = reports()[-1]
    assert last.sizes_vary and last.share == 1.0 and last.programs == 1
    assert len(reports()) == (1 if dynamic else 2)


@torch.no_grad()
def test_ranges_come_from_what_dynamo_was_told() -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    fast = compiled(model)
    for size in (4, 16, 2):
        agree(fast, model, torch.randn(size, 8) if size != 4 else x)
    assert len(reports()) == 1 and only().sizes_vary


@torch.no_grad()
def test_sizes_are_read_off_tensors_and_numbers_vary() -> None:
    def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.relu(x.reshape(x.shape[0] * 2, -1)) * n + x.shape[0]

    fast = compiled(scaled, dynamic=True)
    for size, n in ((3, 4), (5, 7), (6, 2)):
        agree(fast, scaled, torch.randn(size, 8), n)
    assert len(reports()) == 1


@torch.no_grad()
def test_numbers_of_modules_are_constants_that_are_looked_at() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(-0.5, 0.5), nn.LayerNorm(8)).eval()
    fast = compiled(model, dynamic=True)
    for size in (3, 5):
        agree(fast, model, torch.randn(size, 8))
    assert len(reports()) == 1 and only().share == 1.0 and only().programs == 1
    model[1].max_val = 0.1
    agree(fast, model, torch.randn(4, 8))


@torch.no_grad()
def test_new_shapes_are_bounded_as_dynamo_bounds_them() -> None:
    model = Net().eval()
    with torch._dynamo.config.patch(recompile_limit=3):
        fast = compiled(model, dynamic=False)
        for size in range(2, 8):
            agree(fast, model, torch.randn(size, 8))
    assert len(reports()) == 3


@pytest.mark.parametrize(
    "around",
    [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["inference_mode", "autocast"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_surrounds_a_call(around: Callable[[], AbstractContextManager[Any]], dynamic: bool) -> None:
    model = Net().eval().requires_grad_(False)
    fast = compiled(model, dynamic=dynamic)
    for _ in range(2):
        x = torch.randn(3, 8)
        with around():
            got, wanted = fast(x), model(x)
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    assert only().share == 1.0 and only().programs == 1


@torch.no_grad()
def test_autocast_inside_of_a_model_and_switched_off_again() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = self.up(x)
            return self.down(y)

    model, x = Mixed().eval(), torch.randn(3, 8)
    fast = compiled(model, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        agree(fast, model, x, off=2e-2)
    agree(fast, model, x)


@torch.no_grad()
def test_statistics_in_training_are_written_to_the_model() -> None:
    model, twin = Net().train(), Net().train()
    twin.load_state_dict(model.state_dict())
    fast = compiled(model, dynamic=False)
    for _ in range(3):
        x = torch.randn(4, 8)
        agree(fast, twin, x)
    assert model.norm.running_mean is not None and twin.norm.running_mean is not None
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)
    assert int(model.norm.num_batches_tracked or 0) == 3


def test_a_graph_that_needs_gradients_runs_as_captured() -> None:
    model, twin, x = Net(), Net(), torch.randn(4, 8)
    twin.load_state_dict(model.state_dict())
    fast = compiled(model)
    with pytest.warns(UserWarning, match="it needs gradients") as warned:
        (fast(x) + fast(x)).sum().backward()
    assert len(warned) == 1 and only().reason is not None and only().programs == 0
    for _ in range(2):
        twin(x).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_frozen_encoder_is_compiled_while_its_head_is_trained() -> None:
    encoder, head = Net().eval().requires_grad_(False), nn.Linear(8, 2)
    fast, x = compiled(encoder, dynamic=False), torch.randn(4, 8)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    losses = []
    for _ in range(5):
        loss = head(fast(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and only().share == 1.0 and only().programs == 1


@torch.no_grad()
def test_every_option_of_compile_is_passed_on() -> None:
    model, x = Net().eval(), torch.randn(3, 8)
    agree(compiled(model, {"engines": ["onnxruntime"], "torch_executed_ops": ["relu"]}), model, x)
    assert set(only().engines) == {"onnxruntime", "pytorch"}
    assert "torch_executed_ops" in only().plan


@torch.no_grad()
def test_a_name_of_one_graph_is_a_note_in_the_others() -> None:
    model, x = Branches().eval(), torch.randn(3, 8)
    agree(compiled(model, {"torch_executed_ops": ["tanh", "relu"]}, dynamic=False), model, x)
    assert len(reports()) == 2
    assert any("not in this graph: torch_executed_ops names" in note for note in reports()[0].notes)


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ({"options": {"engine": "openvino"}}, "has no option 'engine'; did you mean 'engines'"),
        ({"options": {"dynamic_shapes": {}}}, "'dynamic_shapes' comes from Dynamo"),
        ({"mode": "max-autotune"}, "mode='max-autotune' is a setting of TorchInductor"),
        ({"options": {"engines": ["openvin"]}}, "openvin"),
        ({"options": {"cuda_graphs": True}}, "needs a model on a CUDA device"),
    ],
)
@torch.no_grad()
def test_a_wish_that_means_nothing_is_an_error(rest: dict[str, Any], told: str) -> None:
    fast = torch.compile(Net().eval(), backend=intarsia_backend, **rest)
    with pytest.raises(Exception, match=told):
        fast(torch.randn(3, 8))


@torch.no_grad()
def test_an_error_of_any_kind_leaves_the_graph_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr("intarsia.backend.dynamo_backend.compile_whole", broken)
    model, x = Net().eval(), torch.randn(3, 8)
    with pytest.warns(UserWarning, match="this graph runs in PyTorch .*ZeroDivisionError: a mistake"):
        agree(compiled(model, dynamic=False), model, x)
    assert only().reason == "ZeroDivisionError: a mistake of ours"


@torch.no_grad()
def test_fullgraph() -> None:
    model = Net().eval()
    agree(compiled(model, fullgraph=True), model, torch.randn(3, 8))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(Branches().eval(), fullgraph=True)(torch.randn(3, 8))


@torch.no_grad()
def test_reports_tell_what_each_graph_became() -> None:
    compiled(Net().eval(), dynamic=False)(torch.randn(3, 8))
    assert "test_dynamo_backend.py" in only().where and only().reason is None
    text = str(only())
    assert "nodes on engines" in text and "compiled 1x" in text
    assert reports(clear=True) and not reports()


def test_the_example_in_the_documents_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "torch_compile.md").read_text()
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "optimizer" in code)
    exec(
        example.replace('backend="intarsia"', "backend=intarsia_backend"),
        {"intarsia_backend": intarsia_backend},
    )
    assert only().reason is None and only().programs == 1


class Store(nn.Module):
    def forward(self, cache: torch.Tensor, places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return cache.index_copy(0, places, x) * 2


def test_sizes_at_which_the_model_fails_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A cache of two rows has no place 6. Graphs of torch.fx print such a traceback before they raise it."""
    call = (torch.randn(8, 4), torch.tensor([6]), torch.ones(1, 4))
    agree(compiled(Store(), {"engines": ["onnxruntime"]}, dynamic=True), Store(), *call)
    assert "where PyTorch itself fails" in str(only())
    assert "Traceback" not in capfd.readouterr().err

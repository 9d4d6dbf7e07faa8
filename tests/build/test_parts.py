"""Models that torch.export cannot take run all the same: in parts, and what is not compiled is told."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.capture.protect import shared_copy
from intarsia.errors import CaptureError, InputError, PartitionError, RefitError, StaleWeightsError


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))


class Gated(nn.Module):
    """Takes a branch by the values it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tail, self.calls = mlp(), mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.body(x)
        return self.tail(y) if float(y.sum()) > -1e9 else y - 1


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = mlp(), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(x), lengths, batch_first=True, enforce_sorted=False
        )
        output, (hidden, _) = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0], hidden


@dataclasses.dataclass
class Result:
    scores: torch.Tensor
    count: int
    seen: set[int]  # a set has no form: with plain attributes alone it would be captured whole


class GivesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> Result:
        return Result(self.body(x), len(x), {len(x)})


class Detects(nn.Module):
    """As detection models do: features, then as many results as there are, each through a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = mlp(128)

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        found = []
        for image in images:
            scores = self.head(self.backbone(image[None]))[0]
            keep = torch.nonzero(scores > scores.median())[:, 0]
            found.append({"scores": scores[keep], "labels": keep if len(keep) else keep - 1})
        return found


def leaves(value: Any) -> list[torch.Tensor]:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def assert_alike(fast: nn.Module, model: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        expected = leaves(model.eval()(*args))
    answers = leaves(fast(*args))
    assert len(answers) == len(expected)
    for answer, truth in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, truth, rtol=1e-4, atol=1e-5)


X = torch.linspace(-1, 1, 16).reshape(2, 8)
LENGTHS = torch.tensor([5, 3])


@pytest.mark.parametrize(
    ("model", "args", "parts"),
    [
        (Gated(), (X,), ["body", "tail"]),
        (Packs(), (torch.rand(2, 5, 8), LENGTHS), ["embed"]),
        (GivesDataclass(), (X,), ["body"]),
        (Detects(), ([torch.rand(3, 9, 9), torch.rand(3, 12, 10)],), ["backbone", "head"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_be_captured_is_compiled(model: nn.Module, args: Any, parts: list[str]) -> None:
    fast = intarsia.compile(model, args, min_block_size=1)
    assert isinstance(fast, intarsia.PartlyCompiled) and sorted(fast.parts) == parts
    assert_alike(fast, model, *args)
    assert "not captured as a whole" in fast.notes[0] and "cannot be exported" in str(fast.plan)
    assert {"pytorch"} < set(fast.plan.engines)


def test_a_size_that_differs_between_calls_varies() -> None:
    model = Detects().eval()
    fast = intarsia.compile(model, ([torch.rand(3, 9, 9), torch.rand(3, 12, 10)],), min_block_size=1)
    assert_alike(fast, model, [torch.rand(3, 11, 14)])


def test_other_sizes_go_to_the_module_itself() -> None:
    model = Gated().eval()
    fast = intarsia.compile(model, (X,), min_block_size=1)
    with pytest.warns(UserWarning, match=r"body runs in PyTorch for this call: .*shape"):
        assert_alike(fast, model, torch.rand(5, 8))


def _traced() -> nn.Module:
    return torch.jit.trace(mlp(), X)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("fallback", ["parts", "eager"])
@pytest.mark.parametrize("script", [lambda: torch.jit.script(mlp()), _traced], ids=["script", "trace"])
def test_torchscript_runs_as_it_is(script: Callable[[], nn.Module], fallback: Any) -> None:
    model = script()
    fast = intarsia.compile(model, (X,), fallback=fallback)
    assert isinstance(fast, intarsia.PartlyCompiled) and not fast.parts
    assert "unexpected" not in str(fast.notes)
    assert_alike(fast, model, X)


class HasScript(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.tail = torch.jit.script(mlp())


def test_torchscript_inside_stays_itself() -> None:
    model = HasScript().train()
    fast = intarsia.compile(model, (X,), min_block_size=1)
    assert isinstance(fast, intarsia.PartlyCompiled) and list(fast.parts) == ["body"]
    assert_alike(fast, model, X)


def test_the_users_model_is_left_as_it_was() -> None:
    model = Gated().train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    fast = intarsia.compile(model, (X,), min_block_size=1)
    fast(X)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model.calls == 0 and model.training
    assert fast.model.body[0].weight is model.body[0].weight, "weights are shared"


def test_modules_that_keep_python_state_run_as_they_are() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.n = mlp(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return self.inner(x) * self.n

    model = Gated()
    model.tail = Counts()
    fast = intarsia.compile(model, (X,), min_block_size=1)
    assert sorted(fast.parts) == ["body", "tail.inner"]
    first, second = fast(X), fast(X)
    torch.testing.assert_close(second, first * 2, rtol=1e-4, atol=1e-5)


def test_modules_that_fill_a_list_run_as_they_are() -> None:
    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
            found.append(self.inner(x))
            return x + 1

    class Collecting(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.tail = Collects()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: list[torch.Tensor] = []
            y = self.tail(self.body(x), found)
            return y + found[0] if float(y.sum()) > -1e9 else y

    model = Collecting()
    fast = intarsia.compile(model, (X,), min_block_size=1)
    assert sorted(fast.parts) == ["body", "tail.inner"]
    assert_alike(fast, model, X)


def test_eager_and_error() -> None:
    fast = intarsia.compile(Gated(), (X,), fallback="eager")
    assert isinstance(fast, intarsia.PartlyCompiled) and not fast.parts and "as it is" in fast.notes[-1]
    with pytest.raises(CaptureError, match="cannot be exported"):
        intarsia.compile(Gated(), (X,), fallback="error")
    with pytest.raises(CaptureError, match="cannot be exported"):
        intarsia.compile(Gated(), (X,), require_full_compilation=True)
    with pytest.raises(InputError, match="fallback='part'"):
        intarsia.compile(Gated(), (X,), fallback="part")  # type: ignore[arg-type]


def test_a_wrong_part_is_left_out() -> None:
    """A model whose whole answer hangs on how a module rounds keeps that module as it is."""

    class Brittle(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            bits = y.view(torch.int32) & 0xFF  # the last bits of every number
            return self.tail(x) + bits if float(y.sum()) > -1e9 else y

    model = Brittle()
    fast = intarsia.compile(model, (X,), min_block_size=1)
    assert_alike(fast, model, X)


def test_a_model_that_fails_by_itself_says_so() -> None:
    with pytest.raises(CaptureError, match="fails on the example itself"):
        intarsia.compile(Gated(), (torch.rand(2, 3),))


def test_sizes_that_cannot_vary_are_an_error_not_parts() -> None:
    class Pinned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(2, 8).relu()

    with pytest.raises(CaptureError, match="Constraints violated"):
        intarsia.compile(Pinned(), (X,), dynamic_shapes=({0: torch.export.Dim("n")},))


def test_names_mean_the_whole_model() -> None:
    fast = intarsia.compile(Gated(), (X,), min_block_size=1, torch_executed_modules=["body.0"])
    body = fast.parts["body"].plan
    assert "linear" in str(body) and "pytorch" in body.engines
    assert fast.parts["tail"].plan.engines != body.engines
    with pytest.raises(PartitionError):
        intarsia.compile(Gated().body, (X,), torch_executed_modules=["nowhere"])


def test_a_copy_has_modules_of_its_own_and_the_same_weights() -> None:
    model = nn.Sequential(mlp(), nn.Dropout()).train()
    model.append(model[0])
    copy = shared_copy(model)
    assert copy[0] is copy[2] and copy[0] is not model[0] and not copy.training and model.training
    assert [id(p) for p in copy.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"torch_executed_ops": ["aten::rellu"]}, "torch_executed_ops names 'aten::rellu'.*'aten::relu'"),
        ({"torch_executed_modules": ["bdoy.1"]}, r"torch_executed_modules names 'bdoy.1'.*'body.1'"),
        ({"torch_executed_modules": [nn.LSTM]}, "torch_executed_modules names 'LSTM'"),
        ({"backend_support_map": {"openvin": ["aten::relu"]}}, "backend_support_map names 'openvin'"),
    ],
)
def test_a_name_that_means_nothing_in_any_part_is_an_error(choices: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        intarsia.compile(Gated(), (torch.randn(2, 8),), engines=["onnxruntime"], min_block_size=1, **choices)


def test_a_name_may_mean_what_runs_outside_the_parts() -> None:
    fast = intarsia.compile(
        Gated(), (torch.randn(2, 8),), engines=["onnxruntime"], torch_executed_ops=["aten::sum"]
    )
    assert set(fast.parts) == {"body", "tail"}


@pytest.mark.parametrize("name", ["tail", "ta*", "t*.[012]"])
def test_modules_are_named_as_in_the_whole_model(name: str) -> None:
    model, x = Gated().eval(), torch.randn(2, 8)
    fast = intarsia.compile(
        model, (x,), engines=["onnxruntime"], min_block_size=1, torch_executed_modules=[name]
    )
    assert set(fast.parts) == {"body"}
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_transformer_with_padding_is_compiled_in_parts() -> None:
    """Eager packs padded rows into nested tensors on the way; the parts' calls are recorded with them."""
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True).eval()
    padding = torch.tensor([[False] * 6 + [True] * 2, [False] * 8])
    args = torch.randn(2, 8, 32), torch.randn(2, 6, 32)
    kwargs = {"tgt_mask": torch.ones(6, 6, dtype=torch.bool).triu(1), "src_key_padding_mask": padding}
    fast = intarsia.compile(model, args, kwargs)
    with torch.no_grad():
        torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs), rtol=1e-4, atol=1e-5)
    assert fast.parts


COLLECTED: list[torch.Tensor] = []


class Hooks(nn.Module):
    """Installs hooks that collect what its stages make, when it is first run, as transformers' models do."""

    def __init__(self, *, by_value: bool) -> None:
        super().__init__()
        self.stages, self.by_value = nn.ModuleList([mlp(), mlp()]), by_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "installed"):
            self.installed = True
            for stage in self.stages:
                stage.register_forward_hook(lambda module, args, made: COLLECTED.append(made))
        COLLECTED.clear()
        for stage in self.stages:
            x = stage(x)
        made = torch.cat(COLLECTED, 1)
        return made if not self.by_value or float(x.sum()) > -1e9 else made - 1


@pytest.mark.parametrize("by_value", [False, True])
def test_hooks_that_a_first_run_installs_are_not_installed_twice(by_value: bool) -> None:
    model = Hooks(by_value=by_value).eval()
    fast = intarsia.compile(model, (X,), min_block_size=1)
    assert isinstance(fast, intarsia.PartlyCompiled if by_value else intarsia.Compiled)
    assert fast(X).shape == model(X).shape == (2, 16)
    assert_alike(fast, model, X)


def test_hooks_that_a_copy_installs_are_its_own() -> None:
    model = Hooks(by_value=False).eval()
    copy = shared_copy(model)
    assert copy(X).shape == (2, 16)
    assert not any(stage._forward_hooks for stage in model.stages)
    assert model(X).shape == (2, 16)


CHANGES: dict[str, Callable[[Gated], object]] = {
    "a part": lambda model: setattr(model, "body", mlp()),
    "a module of a part": lambda model: model.body.__setitem__(0, nn.Linear(8, 32)),
    "a hook": lambda model: model.register_forward_hook(lambda *call: call[2] + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_is_changed_later_is_warned_about(change: Callable[[Gated], object]) -> None:
    model, x = Gated().eval(), torch.randn(2, 8)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    before = fast(x)
    change(model)
    with pytest.warns(UserWarning, match="the model was changed after compiling: the model itself"):
        answers = [fast(x) for _ in range(8)]
    torch.testing.assert_close(answers[-1], before)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_answer_alike(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Gated().eval(), torch.randn(2, 8)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    again = copied(fast)
    assert sorted(again.parts) == ["body", "tail"] and again.notes == fast.notes
    torch.testing.assert_close(again(x), fast(x))
    again.load_state_dict({name: tensor + 1 for name, tensor in again.state_dict().items()})
    with pytest.raises(StaleWeightsError):
        again(x)


def test_a_model_in_parts_stays_on_its_device_and_in_its_dtype() -> None:
    model, x = Gated().eval(), torch.randn(2, 8)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    with pytest.raises(InputError, match=r"stays as it was compiled, torch\.float32 on cpu"):
        fast.double()
    with pytest.raises(InputError, match="engines have their own memory"):
        fast.share_memory()
    with pytest.raises(RefitError, match="compiled in parts, which take no new weights; compile it again"):
        fast.refit(model)
    assert next(model.parameters()).dtype is torch.float32
    torch.testing.assert_close(fast.float()(x), model(x).detach())

"""Programs that somebody else wrote, tuned: equal, restored, and safe when things change."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import intarsia
from intarsia.cli.main import app
from intarsia.errors import InputError
from intarsia.tuning import Tuned
from intarsia.tuning.recorded import held_modules

ANYHOW: dict[str, Any] = {"only_if_faster": False, "rounds": 1, "least_share": 0.0, "min_block_size": 1}


class Block(nn.Module):
    """A product that takes some time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.line(self.norm(x)))


class Stateful(nn.Module):
    """Counts its calls in Python, so that it cannot be captured; what is inside it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.calls = nn.ModuleList([Block(), Block()]), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x


class Service:
    """Holds models as services do, and answers in Python."""

    def __init__(self, model: nn.Module) -> None:
        self.models = {"main": model.eval()}

    @torch.no_grad()
    def answer(self, *sizes: int) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(0)
        return [self.models["main"](torch.randn(size, 64, generator=made)) for size in sizes or (4,)]


def agree(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def tuned_service(model: nn.Module | None = None, *sizes: int) -> tuple[Service, Tuned]:
    service = Service(nn.Sequential(Block(), Block()) if model is None else model)
    return service, intarsia.tune(service, lambda: service.answer(*sizes), **ANYHOW)


def test_the_outermost_module_is_compiled_and_put_in_place() -> None:
    service = Service(nn.Sequential(Block(), Block()))
    before = service.answer()
    tuned = intarsia.tune(service, service.answer, **ANYHOW)
    assert list(tuned.placed) == ["models['main']"] and tuned.before is not None and tuned.after is not None
    (placed,) = tuned.placed.values()
    agree(service.answer(), before)
    assert placed.refused is None
    assert "compiled modules: 1" in str(tuned) and "the whole call took" in str(tuned)
    tuned.restore()
    assert "forward" not in service.models["main"].__dict__ and not tuned.placed
    assert all(torch.equal(a, b) for a, b in zip(service.answer(), before, strict=True))


def test_sizes_that_varied_are_ranges_and_others_go_to_the_module() -> None:
    service, tuned = tuned_service(None, 2, 5, 3)
    (placed,) = tuned.placed.values()
    agree(service.answer(4, 9, 10), _eager(service, 4, 9, 10))
    assert placed.refused is None and len(placed.programs) == 1
    with pytest.warns(UserWarning, match="runs in PyTorch for this call"):
        answer = service.answer(40)
    agree(answer, _eager(service, 40))


def _eager(service: Service, *sizes: int) -> list[torch.Tensor]:
    placed = service.models["main"].__dict__.pop("forward")
    try:
        return service.answer(*sizes)
    finally:
        service.models["main"].__dict__["forward"] = placed


def test_what_cannot_be_compiled_is_looked_into() -> None:
    service, tuned = tuned_service(Stateful())
    assert sorted(tuned.placed) == ["models['main'].blocks.0", "models['main'].blocks.1"]
    assert "calls, which a run of the model changes" in tuned.left["models['main']"]
    counted = service.models["main"].calls
    service.answer()
    assert service.models["main"].calls == counted + 1


def test_a_weight_written_to_or_replaced_is_the_modules_own_again() -> None:
    for change in ("write", "replace", "data"):
        service, tuned = tuned_service()
        line: nn.Linear = service.models["main"][0].line  # type: ignore[assignment,index,union-attr]
        with torch.no_grad():
            if change == "write":
                line.weight.mul_(2)
            elif change == "replace":
                line.weight = nn.Parameter(torch.randn(64, 64))
            else:
                line.bias.data = torch.randn(64)
        with pytest.warns(UserWarning, match="runs in PyTorch"):
            answer = service.answer()
        agree(answer, _eager(service, 4))
        assert tuned.placed


def test_training_gradients_and_autocast_are_the_modules_own() -> None:
    service, tuned = tuned_service()
    model, x = service.models["main"], torch.randn(4, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    model.train()
    assert model(torch.randn(4, 64)).requires_grad
    model.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model[0].line(torch.randn(4, 64)).dtype is torch.bfloat16  # type: ignore[index,operator]
        mixed = model(torch.randn(4, 64))
    assert mixed.dtype is torch.float32 and tuned.placed


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda model: model.train(), "training mode"),
        (lambda model: model.register_forward_hook(lambda *_: None), "hooks"),
        (lambda model: model.__dict__.update(forward=model.forward), "replaced by other code"),
    ],
)
def test_what_is_not_ours_to_replace(spoil: Any, reason: str) -> None:
    model = Block().eval()
    spoil(model)
    with torch.no_grad():
        tuned = intarsia.tune({"block": model}, lambda: model(torch.ones(4, 64)), **ANYHOW)
    assert reason in next(why for path, why in tuned.left.items() if path == "['block']")


def test_weights_made_in_inference_mode_are_not_frozen() -> None:
    with torch.inference_mode():
        model = Block().eval()
        tuned = intarsia.tune({"block": model}, lambda: model(torch.ones(4, 64)), **ANYHOW)
    assert "inference mode" in tuned.left["['block']"]


def test_a_slower_program_is_not_kept() -> None:
    model = nn.Linear(2, 2).eval()  # of microseconds: no engine is faster
    with torch.no_grad():
        tuned = intarsia.tune({"line": model}, lambda: model(torch.ones(1, 2)))
    assert not tuned.placed and "forward" not in model.__dict__


def test_what_takes_no_time_is_left_alone() -> None:
    model = Block().eval()
    with torch.no_grad():
        tuned = intarsia.tune({"block": model}, lambda: model(torch.ones(4, 64)), least_share=1.1)
    assert "of the time" in tuned.left["['block']"] and not tuned.placed


def test_a_with_block_restores() -> None:
    service, tuned = tuned_service()
    with tuned:
        assert "forward" in service.models["main"].__dict__
    assert "forward" not in service.models["main"].__dict__


@pytest.mark.parametrize(
    ("target", "call", "options", "told"),
    [
        ({}, lambda: 0, {}, "found no nn.Module in this dict"),
        (nn.Linear(2, 2), lambda: 0, {}, "the call used none of the 1 modules"),
        (nn.Linear(2, 2), "no function", {}, "call must be a function"),
        (nn.Linear(2, 2), lambda: 0, {"engine": "x"}, "no option 'engine'; did you mean 'engines'"),
        (nn.Linear(2, 2), lambda: 0, {"fallback": "eager"}, "fallback is not an option of tune"),
    ],
)
def test_wrong_uses_are_told(target: Any, call: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        intarsia.tune(target, call, **options)


@dataclass(slots=True)
class _Slots:
    model: nn.Module


def test_modules_in_slots_are_found() -> None:
    assert list(held_modules([_Slots(nn.Sequential(nn.ReLU()))])) == ["[0].model", "[0].model.0"]


# `intarsia tune script.py`: a script nobody edits.


SCRIPT = """
import sys
import torch
from torch import nn

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)

torch.manual_seed(0)
model = Counts().eval()
with torch.no_grad():
    total = sum(model(torch.full((size, 64), 0.5)).sum().item() for size in (2, 3, 4, 5, 3, 4, 5, 2, 4, 3))
print(f"{sys.argv[1:]} {model.calls} {total:.3f}")
sys.exit(3)
"""


def test_a_script_is_run_as_it_is_and_its_modules_are_compiled(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    argv = list(sys.argv)
    made = CliRunner().invoke(app, ["tune", "--always", "--after", "2", str(script), "--loud", "a"])
    assert made.exit_code == 3, made.output
    assert "['--loud', 'a'] 10 " in made.output
    assert (
        "Counts 1 stays as it is" in made.output and "calls, which a run of the model changes" in made.output
    )
    assert "Counts 1.inner took" in made.output
    assert sys.argv == argv
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


def test_the_answer_is_the_scripts_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("sys.exit(3)", ""))
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    plain = capsys.readouterr().out.split()[-1]
    made = CliRunner().invoke(app, ["tune", "--always", str(script)])
    assert made.exit_code == 0 and f"10 {plain}" in made.output


def test_a_script_that_is_not_there_is_told() -> None:
    made = CliRunner().invoke(app, ["tune", "nowhere.py"])
    assert "there is no script 'nowhere.py'" in str(made.exception)

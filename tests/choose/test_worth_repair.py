"""A search repairs a wrong plan only where it may win, on the smallest call that shows the fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.choose.test_choose import _timed
from torch import nn

import intarsia
from intarsia.choose.candidate import Built, Candidate, Workshop
from intarsia.choose.findings import MeasuredPlan
from intarsia.choose.measured import Measured
from intarsia.engines import OnnxRuntime, Program
from intarsia.network import Network


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.erf(torch.tanh(x * 2) + 1) - 0.5)


@dataclass(frozen=True)
class Wrong(OnnxRuntime):
    """ONNX Runtime with an `erf` that is off by 0.25 from so many elements on."""

    name: ClassVar[str] = "wrong"
    elements: int = 0
    sizes: list[int] = field(default_factory=list, compare=False, repr=False)  # of every run
    wrong_builds: list[bool] = field(default_factory=list, compare=False, repr=False)

    def build(self, net: Network) -> Program:
        program = super().build(net)
        is_wrong = any(layer.kind == "Erf" for layer in net.get_layers())
        self.wrong_builds.append(is_wrong)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.sizes.append(tensors[0].numel())
            off = 0.25 if is_wrong and tensors[0].numel() >= self.elements else 0.0
            return tuple(answer + off for answer in program(*tensors))

        return run


def compiled(wrong: Wrong, **more: object) -> intarsia.Compiled:
    x = torch.randn(4, 50)
    fast = intarsia.compile(
        Net(),
        (x,),
        engines=["onnxruntime", wrong],
        partition=Measured(budget_s=60),
        min_block_size=1,
        **more,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(fast(x), Net()(x), rtol=1e-4, atol=1e-5)
    return fast


@pytest.mark.parametrize("best_s", [0.0, 9.0])
def test_what_is_slower_than_the_best_plan_is_not_repaired(
    best_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _timed(monkeypatch, {"": best_s})
    plan = compiled(Wrong()).plan
    assert isinstance(plan, MeasuredPlan)
    left_out = [reason for reason in plan.findings.left_out if "it is not repaired" in reason]
    if not best_s:
        assert left_out and "wrong answers wrongly: output 0 is off by" in left_out[0]
        assert "wrong" not in [trial.name for trial in plan.findings.trials]
    else:
        assert not left_out
        assert "wrong" in [trial.name for trial in plan.findings.trials], plan.findings.left_out


def test_nodes_at_fault_are_looked_for_on_the_smallest_call_that_shows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _timed(monkeypatch, {"onnxruntime": 1.0})
    wrong, batch = Wrong(elements=100), torch.export.Dim("batch", min=1, max=64)
    compiled(wrong, dynamic_shapes={"x": {0: batch}})
    shown = wrong.sizes.index(200)  # 50 elements answer rightly, the call's own 200 do not
    assert set(wrong.sizes[: shown + 1]) == {50, 200}
    assert 64 * 50 not in wrong.sizes, "the largest call is left to the plan that is taken"


def test_a_plan_that_is_wrong_on_the_largest_call_alone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _timed(monkeypatch, {"wrong": 1.0})
    wrong, batch = Wrong(elements=1000), torch.export.Dim("batch", min=1, max=64)
    x = torch.randn(4, 50)
    fast = intarsia.compile(
        Net(),
        (x,),
        engines=[wrong],
        partition=Measured(budget_s=60),
        min_block_size=1,
        dynamic_shapes={"x": {0: batch}},
    )
    largest = torch.randn(64, 50)
    torch.testing.assert_close(fast(largest), Net()(largest), rtol=1e-4, atol=1e-5)
    assert 64 * 50 in wrong.sizes
    assert any("the fastest plan is not used" in note for note in fast.notes)
    assert [segment.engine for segment in fast.plan.segments] == ["wrong", "pytorch", "wrong"], fast.plan


def test_what_one_variant_showed_is_not_looked_for_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    _timed(monkeypatch, {"wrong": 1.0})
    wrong, wrong_builds, build = Wrong(), dict[str, int](), Workshop.build

    def counted(workshop: Workshop, candidate: Candidate, *more: Any) -> Built:
        before = sum(wrong.wrong_builds)
        built = build(workshop, candidate, *more)
        wrong_builds[candidate.name] = sum(wrong.wrong_builds) - before
        return built

    monkeypatch.setattr(Workshop, "build", counted)
    compiled(wrong)
    assert wrong_builds["wrong"] > 1 and wrong_builds["wrong, no patterns"] == 0

"""The fuzzer: models are drawn alike each time, wrong answers are noticed and made small, a run resumes."""

from __future__ import annotations

import json

import pytest
import torch
from tests.fuzz import campaign, dying
from tests.fuzz.__main__ import app
from tests.fuzz.campaign import Campaign, reproduce, script, shrink
from tests.fuzz.check import Outcome, Verdict, check, difference
from tests.fuzz.draw import Case, Options, draw_case
from tests.fuzz.program import Program, Statement, Value
from torch.nn import functional as F
from typer.testing import CliRunner

from intarsia.runtime.freshness import Freshness

SHARE = 50  # models of each of the four tests below: 200 in all


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_models_answer_as_eager(part: int) -> None:
    wrong = {}
    for seed in range(part * SHARE, (part + 1) * SHARE):
        outcome = check(draw_case(seed))
        if outcome.wrong:
            wrong[seed] = outcome.said
    assert wrong == {}


def test_a_seed_draws_the_same_model() -> None:
    assert [draw_case(seed).program.source() for seed in range(20)] == [
        draw_case(seed).program.source() for seed in range(20)
    ]


def _case(*lines: tuple[str, str], result: str) -> Case:
    program = Program(
        (Value("x0", "torch.randn(n, 3, generator=g)"),),
        (),
        (),
        tuple(Statement(expression, target) for target, expression in lines),
        result,
    )
    return Case(program, Options())


def test_a_wrong_case_becomes_small() -> None:
    case = _case(
        ("v0", "torch.relu(x0)"),
        ("v1", "v0 + 1"),
        ("v2", "torch.floor(v1)"),
        ("v3", "v2 * 2"),
        result="(v3, v1)",
    )
    smallest = shrink(case, lambda other: "floor" in other.program.source())
    assert [str(s) for s in smallest.program.statements] == ["v2 = torch.floor(x0)"]
    printed = script(smallest, "for a test")
    exec(compile(printed, "<printed>", "exec"), {})  # what is printed runs


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (torch.tensor([1.0, 1e9]), torch.tensor([1.1, 1e9]), "1 of 2 elements differ"),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "1 of 1 elements differ"),
        (torch.tensor([1]), torch.tensor([2]), "1 of 1 elements differ"),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), "float64"),
        (3, 4, "leaf 0 is 4"),
    ],
)
def test_differences_are_noticed(theirs: object, ours: object, said: str) -> None:
    model = torch.torch.nn.Identity()
    assert said in str(difference(model, (), (theirs, ()), (ours, ())))
    assert difference(model, (), (theirs, ()), (theirs, ())) is None


def test_a_double_cast_from_a_float_is_rounded_as_one() -> None:
    model = torch.nn.Identity()
    near = torch.tensor([0.9999999403953552, torch.inf], dtype=torch.float64)
    assert difference(model, (), (torch.tensor([1.0, torch.inf]).double(), ()), (near, ())) is None
    third = torch.tensor([1 / 3, torch.inf], dtype=torch.float64)
    assert difference(model, (), (third, ()), (third * (1 - 1e-9), ())) is not None


def test_a_float_cast_from_a_half_is_rounded_as_one() -> None:
    model, third = torch.nn.Identity(), torch.tensor([1 / 3])
    assert difference(model, (), (third.half().float(), ()), (third, ())) is None
    assert difference(model, (), (third, ()), (third * (1 - 2e-4), ())) is not None
    assert difference(model, (), (torch.tensor([3.0]), ()), (torch.tensor([3.001]), ())) is not None


class _NormOfEqualElements(torch.nn.Module):
    """Its answer is 0; what float32 gives is the rounding of a mean, magnified 300 times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = F.rms_norm((x > x) + 1e-3, x.shape[-1:])
        return F.group_norm(made, 1, self.weight)


def test_rounding_of_what_a_model_makes_itself_is_seen() -> None:
    model, given = _NormOfEqualElements(), (torch.randn(4, 8, 3, 8),)
    truth = model(*given).detach()
    assert float(truth.abs().max()) > 2e-6 and torch.get_default_dtype() == torch.float32
    assert difference(model, given, (truth, given), (truth + 2.2e-5, given)) is None
    assert difference(model, given, (truth, given), (truth + 1e-3, given)) is not None
    assert torch.get_default_dtype() == torch.float32


def test_a_run_resumes_where_it_stopped(tmp_path, monkeypatch) -> None:
    state = tmp_path / "state.jsonl"
    state.write_text(json.dumps({"seed": 0, "verdict": "equal", "said": ""}) + "\n" + '{"seed": 1, "ver')
    tried: list[int] = []

    def outcomes(seeds, jobs, limit_s):
        for seed in seeds:
            tried.append(seed)
            yield seed, Outcome(Verdict.EQUAL)

    monkeypatch.setattr(campaign, "_outcomes", outcomes)
    counts = Campaign(models=3, state=state).run()
    assert tried == [1, 2] and counts[Verdict.EQUAL] == 3
    tried.clear()
    Campaign(models=3, state=state).run()
    assert tried == []


def test_a_process_that_dies_is_one_failure(monkeypatch) -> None:
    monkeypatch.setattr(campaign, "_serve", dying.serve)
    counts = Campaign(models=2).run()
    assert counts == {Verdict.FAILED: 2}


def test_the_command_prints_a_model_and_counts() -> None:
    done = CliRunner().invoke(app, ["--models", "2"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "2 equal" in done.output or "refused" in done.output


def test_reproduce_prints_a_program() -> None:
    assert "class Model(nn.Module)" in reproduce(0)


def test_a_fused_step_that_goes_unnoticed_is_different(monkeypatch) -> None:
    program = Program(
        (Value("x0", "torch.randn(n, 3, generator=g)"),),
        (Value("w0", "torch.randn(3, 8, generator=g)"),),
        (),
        (Statement("torch.relu(x0 @ w0)", "v0"),),
        "v0",
        container="dict",
    )
    case = Case(program, Options(engines=("openvino",), step=True))
    assert check(case).verdict is Verdict.EQUAL
    monkeypatch.setattr(Freshness, "contents_change", lambda self, thorough=False: None)
    outcome = check(case)
    assert outcome.verdict is Verdict.DIFFERENT and outcome.said.startswith("after a fused step")


def test_training_mode_containers_and_branches_are_drawn() -> None:
    cases = [draw_case(seed) for seed in range(100)]
    sources = [case.program.source() for case in cases]
    assert any(case.options.training and "self.training" in s for case, s in zip(cases, sources, strict=True))
    assert {"list", "dict", "inside"} <= {case.program.container for case in cases}
    assert any(" if " in source for source in sources) and any("torch.cond" in source for source in sources)

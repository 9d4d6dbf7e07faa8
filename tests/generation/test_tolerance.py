"""Generation within a tolerance: weights of few bits reach the tokens, and what does not fit stays exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from tests.generation.families import tiny

import intarsia
from intarsia.choose import search
from intarsia.choose.measured import Measured
from intarsia.engines import (
    Engine,
    OnnxRuntimeInt4Weights,
    OnnxRuntimeInt8Weights,
    OpenVINOInt4Weights,
    OpenVINOInt8Weights,
)
from intarsia.errors import InputError
from intarsia.generation import compile as job
from intarsia.generation import programs
from intarsia.generation.anatomy import anatomy_of
from intarsia.generation.check import Checked
from intarsia.generation.programs import GenerationJob
from intarsia.options import CompileOptions

ROOM = 24
PROMPT = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(1))
FULL = pytest.mark.full


def llama() -> Any:
    """Weights as they are drawn by default: errors are those of rounding, not of chaos."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, eos_token_id=None, pad_token_id=0)).eval()


def _prefer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Races in which plans of this name are ten times as fast as others."""

    def race(calls: Mapping[str, Callable[[], object]], *_: object, **__: object) -> Any:
        return {one: (1e-9 if one.startswith(name) else 1e-8,) * 4 for one in calls}

    monkeypatch.setattr("intarsia.choose.race.race_plans", race)


def _made(model: Any, engine: Engine, tolerance: float, **more: Any) -> Any:
    return intarsia.compile_generation(
        model,
        max_length=ROOM,
        engines=[engine.family],
        precision=engine.arithmetic,
        tolerance=tolerance,
        partition=Measured(budget_s=60, candidates=()),
        **more,
    )


@pytest.mark.parametrize(
    "engine",
    [
        OnnxRuntimeInt4Weights(),
        pytest.param(OpenVINOInt8Weights(), marks=FULL),
        pytest.param(OnnxRuntimeInt8Weights(), marks=FULL),
        pytest.param(OpenVINOInt4Weights(), marks=FULL),
    ],
    ids=lambda engine: engine.name,
)
def test_short_weights_reach_the_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    _prefer(monkeypatch, engine.name)
    model = llama()
    with _made(model, engine, 0.3, examples=[PROMPT]) as made:
        assert made.forward.by_rows[1].token.plan.engines == (engine.name,)
        assert 1e-4 < made.error <= 0.3 and not made.notes
        assert f"error of logits {made.error:.2g} of the largest; tolerance=0.3" in str(made)
        asked = {"do_sample": False, "max_new_tokens": 8, "output_logits": True}
        before = dict(made.forward.runs)
        ours = made.generate(PROMPT, return_dict_in_generate=True, **asked)
        assert made.forward.runs["token"] - before["token"] == 7 and made.forward.runs["own"] == before["own"]
        made.enable(False)
        own = made.generate(PROMPT, return_dict_in_generate=True, **asked)
    error = (ours.logits[0] - own.logits[0]).abs().max() / own.logits[0].abs().max()
    assert 1e-4 < float(error) <= 0.3


def test_a_tolerance_too_small_keeps_tokens_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OnnxRuntimeInt4Weights()
    _prefer(monkeypatch, "onnxruntime")
    monkeypatch.setattr(search.Search, "_with_exact_blocks", lambda *_: [])
    model = tiny("llama")
    expected = model.generate(PROMPT, do_sample=False, max_new_tokens=8)
    with _made(model, engine, 1e-5) as made:
        assert made.forward.by_rows[1].token.plan.engines == ("onnxruntime",) and made.error <= 1e-5
        (note,) = made.notes
        assert note.startswith("tokens are exact: nothing shorter is faster within tolerance=1e-05: onnxrun")
        assert f"{engine.name}: its error is" in note and note in str(made)
        assert torch.equal(made.generate(PROMPT, do_sample=False, max_new_tokens=8), expected)


@pytest.mark.parametrize(("fits", "short"), [("token", ["token"]), ("nothing", [])])
def test_errors_that_add_up_over_tokens(fits: str, short: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def program(options: CompileOptions) -> Any:
        is_short = options.accuracy.tolerance is not None
        name = "onnxruntime-int8-weights" if is_short else "onnxruntime"
        return SimpleNamespace(plan=SimpleNamespace(engines=(name,)), notes=())

    def used(forward: Any) -> list[str]:
        own = {"prompt": forward.by_rows[1].prompt, "token": forward.by_rows[1].token}
        return [part for part, made in own.items() if job.is_short(made)]

    def check(forward: Any, *_: Any) -> Checked:
        wrong = [part for part in used(forward) if part != fits]
        return Checked(0.4, f"is off in the {wrong[0]}") if wrong else Checked(0.1)

    monkeypatch.setattr(GenerationJob, "prompts", lambda self, rows, options: (program(options), None))
    monkeypatch.setattr(GenerationJob, "token", lambda self, rows, options: program(options))
    monkeypatch.setattr(job, "checked", check)
    with intarsia.compile_generation(llama(), max_length=ROOM, tolerance=0.3) as made:
        assert used(made.forward) == short and made.error == 0.1 and made.forward.enabled
        assert (
            made.notes[0]
            == "prompts are exact: in shorter arithmetic, the compiled model is off in the prompt"
        )
        assert len(made.notes) == 2 - len(short)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_examples_are_calls_of_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    anatomy = anatomy_of(model, ROOM)
    with torch.no_grad():
        expected = model(PROMPT).logits[:, -1]

    def calls_of(options: CompileOptions, step: Any, feed: Any, dynamic_shapes: Any = None) -> Any:
        return step, [feed, *options.accuracy.examples]

    monkeypatch.setattr(programs, "compile_with", calls_of)
    examples = [PROMPT, PROMPT.flip(1), PROMPT]
    generation = GenerationJob(model, anatomy, (1,), ROOM, True, examples)
    prompts = generation.prompts(1, CompileOptions())
    token = generation.token(1, CompileOptions())
    for made in [*prompts, token]:
        if made is None:
            continue
        step, calls = made  # type: ignore[misc]
        with torch.no_grad():
            logits = [step(*call)[0][:, -1] for call in calls]
        assert len(logits) == 3 and not torch.allclose(logits[1], expected, atol=1e-2)
        torch.testing.assert_close(logits[::2], [expected, expected], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"examples": [PROMPT[:, :4]]}, r"an example is \(1, 4\); it must have 1 rows and 8 to 24 tokens"),
        ({"examples": [PROMPT.expand(2, -1)]}, r"an example is \(2, 9\); it must have 1 rows"),
        ({"examples": [PROMPT.float()]}, "an example is torch.float32 .* must be token ids"),
        ({"precision": "int4-weights"}, "precision='int4-weights' needs tolerance="),
    ],
)
def test_wishes_that_contradict(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        intarsia.compile_generation(llama(), max_length=ROOM, **wrong)

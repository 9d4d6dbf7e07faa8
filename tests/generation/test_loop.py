"""Tokens chosen step by step without transformers' loop: the same tokens, or its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.generation.families import tiny
from transformers import StaticCache, TextStreamer

import intarsia
from intarsia.generation import Generation
from intarsia.generation.loop import LoopedGenerate


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def made(request: pytest.FixtureRequest) -> Iterator[Generation]:
    """On a CPU a step is run, not replayed; all else is what a GPU does."""
    with intarsia.compile_generation(
        tiny(request.param), max_length=40, batch=(1, 3), engines="onnxruntime"
    ) as made:
        yield made


def generated(
    made: Generation, rows: int, seed: int = 0, **asked: Any
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens by steps, the model's own, and how many steps there were."""
    ids = torch.randint(3, 128, (rows, 7), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1:, :2] = 0
    results, loop = [], made.forward.loop
    assert isinstance(loop, LoopedGenerate)
    for generate in (loop, loop.own):
        made.enable(generate is loop)
        torch.manual_seed(seed)
        results.append(generate(ids * mask, attention_mask=mask, pad_token_id=0, **asked))
    made.enable()
    return results[0], results[1], sum(len(step.state) > 0 for step in loop._steps.values())


CHOICES = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": True, "repetition_penalty": 1.2, "min_p": 0.05},
]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_tokens_are_those_of_transformers(made: Generation, rows: int, choice: dict[str, Any]) -> None:
    found, expected, steps = generated(made, rows, max_new_tokens=20, **choice)
    assert torch.equal(found, expected)
    assert steps > 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_rows_end_where_transformers_ends_them(made: Generation, rows: int, seed: int) -> None:
    asked = {"max_new_tokens": 30, "do_sample": True, "eos_token_id": list(range(60, 75)), "seed": seed}
    found, expected, _ = generated(made, rows, **asked)
    assert torch.equal(found, expected)


def test_a_cache_that_was_given_holds_every_token_but_the_last(made: Generation) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=made.model.config)
    ids = torch.tensor([[5, 9, 7]])
    tokens = made.model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert cache.get_seq_length() == tokens.shape[1] - 1
    further = made.model.generate(tokens, past_key_values=cache, max_new_tokens=6, do_sample=False)
    made.enable(False)
    expected = made.model.generate(ids, max_new_tokens=12, do_sample=False)
    made.enable()
    assert torch.equal(further, expected)


@pytest.mark.parametrize("asked", [{"num_beams": 3}, {"streamer": True}, {"logits_processor": True}], ids=str)
def test_what_is_not_known_is_left_to_transformers(made: Generation, asked: dict[str, Any]) -> None:
    class Same:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    class Words:
        def decode(self, *_: Any, **__: Any) -> str:
            return ""

    if "streamer" in asked:
        asked = {"streamer": TextStreamer(Words())}
    if "logits_processor" in asked:
        asked = {"logits_processor": [Same()]}
    ids = torch.tensor([[5, 9, 7]])
    found = made.model.generate(ids, max_new_tokens=6, do_sample=False, **asked)
    made.enable(False)
    expected = made.model.generate(ids, max_new_tokens=6, do_sample=False, **asked)
    made.enable()
    assert torch.equal(found, expected)


def test_steps_of_a_call_in_inference_mode_serve_later_calls(made: Generation) -> None:
    ids = torch.tensor([[5, 9, 7]])
    asked = {"max_new_tokens": 6, "do_sample": True, "top_k": 9}  # no other test's steps
    answers = []
    for inference in (True, False, True):
        torch.manual_seed(0)
        with torch.inference_mode(inference):
            answers.append(made.model.generate(ids, **asked))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch for this call")
def test_a_static_cache_is_left_to_transformers(made: Generation) -> None:
    ids = torch.tensor([[5, 9, 7]])
    before = made.forward.runs["own"]
    cache = StaticCache(config=made.model.config, max_cache_len=40)
    tokens = made.model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert made.forward.runs["own"] == before + 6
    assert torch.equal(tokens, made.model.generate(ids, max_new_tokens=6, do_sample=False))


def _train(made: Generation) -> None:
    made.model.train()


def _write(made: Generation) -> None:
    with torch.no_grad():
        made.model.lm_head.weight.mul_(-1)


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch for this call")
@pytest.mark.parametrize("change", [_train, _write, None], ids=["training", "write", "none"])
def test_tokens_of_a_model_that_was_changed_are_its_own(change: Callable[[Generation], None] | None) -> None:
    """All of them: if the model's own forward computes the first token, programs compute no others."""
    with intarsia.compile_generation(tiny("llama"), max_length=40, engines="pytorch") as made:
        ids = torch.tensor([[5, 9, 7]])
        before = made.forward.runs["token"]
        if change is not None:
            change(made)
        with torch.autocast("cpu", torch.bfloat16, enabled=change is None):
            made.model.generate(ids, max_new_tokens=6, do_sample=False)
        assert made.forward.runs["token"] == before


def test_restored_the_model_has_its_own_generate() -> None:
    model = tiny("llama")
    with intarsia.compile_generation(model, max_length=16, engines="pytorch"):
        assert "generate" in vars(model)
    assert "generate" not in vars(model)

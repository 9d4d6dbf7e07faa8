"""`generate` on a compiled decoder: the same tokens as before, however it is asked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.generation.families import smallest, tiny
from transformers import (
    DynamicCache,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    TextStreamer,
)

import intarsia
from intarsia.errors import InputError, IntarsiaError
from intarsia.generation import Generation
from intarsia.generation.anatomy import Anatomy

ROOM = 40


@pytest.fixture(scope="module")
def llama() -> Iterator[Generation]:
    with intarsia.compile_generation(tiny("llama"), max_length=ROOM, batch=2, engines="onnxruntime") as made:
        yield made


def padded(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


class Ear(TextStreamer):  # type: ignore[misc]
    """Keeps the tokens that are streamed to it."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.extend(value.flatten().tolist())

    def end(self) -> None: ...


def both(made: Generation, **call: Any) -> tuple[Any, Any, dict[str, int]]:
    """What `generate` gives compiled and as it was, and who ran the forwards of the first."""
    before = dict(made.forward.runs)
    torch.manual_seed(3)
    ours = made.generate(**call)
    runs = {name: made.forward.runs[name] - before[name] for name in before}
    made.enable(False)
    torch.manual_seed(3)
    own = made.generate(**call)
    made.enable()
    return ours, own, runs


def test_greedy_tokens_and_logits_are_the_models(llama: Generation) -> None:
    kinds = {"do_sample": False, "max_new_tokens": 30, "output_logits": True, "return_dict_in_generate": True}
    ours, own, runs = both(llama, **padded(), **kinds)
    assert torch.equal(ours.sequences, own.sequences)
    assert len(set(own.sequences[1, 9:].tolist())) > 5  # not one token over and over
    for a, b in zip(ours.logits, own.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert runs == {"prompt": 1, "token": 29, "own": 0}
    assert type(ours.past_key_values) is DynamicCache


@pytest.mark.parametrize(
    "kind",
    [
        {"do_sample": True, "temperature": 1.5, "top_k": 20},
        {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.3},
        {"do_sample": False, "eos_token_id": list(range(100, 110))},
    ],
    ids=["top_k", "top_p", "stopping"],
)
def test_sampling_and_stopping(llama: Generation, kind: dict[str, Any]) -> None:
    ours, own, runs = both(llama, **padded(), max_new_tokens=20, **kind)
    assert torch.equal(ours, own)
    assert runs["own"] == 0


@pytest.mark.parametrize(
    "kind", [{"num_beams": 2}, {"num_beams": 2, "do_sample": True}], ids=["beam", "drawn"]
)
def test_beams_reorder_the_cache(llama: Generation, kind: dict[str, Any]) -> None:
    ids = padded()["input_ids"][1:]
    ours, own, runs = both(llama, input_ids=ids, max_new_tokens=20, **kind)
    assert torch.equal(ours, own)
    assert runs["own"] == 0


def test_prompts_of_all_lengths_one_after_the_other(llama: Generation) -> None:
    for length in (1, 2, 3, 17, 30, 5):
        ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(length))
        ours, own, runs = both(llama, input_ids=ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(ours, own), length
        assert runs["own"] == 0


def test_longer_than_memory_goes_on_in_pytorch(llama: Generation) -> None:
    with pytest.warns(UserWarning, match="reaches token 41, and max_length is 40"):
        ours, own, runs = both(llama, **padded(), max_new_tokens=50, do_sample=False)
    assert torch.equal(ours, own)
    assert runs["own"] == 50 - 1 - (ROOM - 9)


def test_other_rows_and_attentions_are_the_models_own(llama: Generation) -> None:
    with pytest.warns(UserWarning, match="it has 3 rows; compiled for 2"):
        ours, own, runs = both(llama, **padded(3), max_new_tokens=5, do_sample=False)
    assert torch.equal(ours, own) and runs == {"prompt": 0, "token": 0, "own": 5}
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        ours, own, _ = both(
            llama, **padded(), max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True
        )
    assert len(ours.hidden_states) == len(own.hidden_states) == 3


def test_a_conversation_continues_on_its_cache(llama: Generation) -> None:
    model: Any = llama.model

    def talk() -> torch.Tensor:
        cache, ids = DynamicCache(config=model.config), padded()["input_ids"]
        mask = padded()["attention_mask"]
        for turn in range(3):
            ids = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False
            )
            more = torch.full((2, 3), 5 + turn)
            ids = torch.cat([ids, more], 1)
            mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], 1)
        return ids

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = talk()
        llama.enable(False)
        own = talk()
        llama.enable()
    assert torch.equal(ours, own)


def test_the_cache_may_change_hands_at_any_token(llama: Generation) -> None:
    _change_hands(llama)


@pytest.mark.slow
def test_the_memory_of_all_layers_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: stacked, and longer than the tokens so that rows are aligned."""
    monkeypatch.setattr(Anatomy, "stacked", property(lambda anatomy: True))
    monkeypatch.setattr(Anatomy, "room", lambda anatomy, tokens: tokens + 8)
    with intarsia.compile_generation(tiny("llama"), max_length=ROOM, batch=2, engines="pytorch") as made:
        _change_hands(made)
        for call in (padded(), {"input_ids": padded()["input_ids"][1:], "num_beams": 2}):
            ours, own, runs = both(made, **call, max_new_tokens=31, do_sample=False)
            assert torch.equal(ours, own)
            assert runs == {"prompt": 1, "token": 30, "own": 0}


@pytest.mark.full
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_caches_of_sliding_windows_change_hands(family: str) -> None:
    with intarsia.compile_generation(tiny(family), max_length=ROOM, batch=2, engines="onnxruntime") as made:
        _change_hands(made)
        ours, own, runs = both(made, **padded(1), num_beams=2, max_new_tokens=25)
        assert torch.equal(ours, own) and runs["own"] == 0


def _change_hands(llama: Generation) -> None:
    model: Any = llama.model
    own: Any = llama.forward.own
    call = padded()
    truth, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    truth.activate_past_recording()  # or sliding windows cannot be cropped
    ids, mask = call["input_ids"], call["attention_mask"]
    with torch.no_grad():
        for step in range(8):
            position = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            kinds = {"attention_mask": mask, "position_ids": position, "logits_to_keep": 1}
            expected = own(input_ids=ids, past_key_values=truth, **kinds).logits
            llama.enable(step % 3 != 1)
            found = model(input_ids=ids, past_key_values=ours, **kinds).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            if step == 4:
                for cache in (truth, ours):
                    cache.reorder_cache(torch.tensor([1, 0]))
                mask = mask.flip(0)
            if step == 5:
                for cache in (truth, ours):
                    cache.crop(-2)
                mask = mask[:, :-2]
            ids = expected[:, -1].argmax(-1, keepdim=True)
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    llama.enable()
    assert truth.get_seq_length() == ours.get_seq_length()


def test_streaming_return_dict_and_signature(llama: Generation) -> None:
    model: Any = llama.model
    ear = Ear()
    with pytest.warns(UserWarning, match="a cache is passed with use_cache=False"), torch.no_grad():
        model(**padded(), past_key_values=DynamicCache(), use_cache=False, logits_to_keep=1)
    made = model.generate(padded()["input_ids"][1:], max_new_tokens=4, do_sample=False, streamer=ear)
    assert ear.heard == made[0].tolist()
    with torch.no_grad():
        logits, cache = model(**padded(), logits_to_keep=1, return_dict=False)
    assert logits.shape == (2, 1, 128) and cache.get_seq_length() == 9


def test_weights_that_change_are_the_models() -> None:
    model = smallest()
    call = {"input_ids": padded()["input_ids"][1:], "max_new_tokens": 5, "do_sample": False}
    made = intarsia.compile_generation(model, max_length=16, engines="onnxruntime")
    assert "batch 1, token: on onnxruntime" in str(made)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        ours = made.generate(**call)
    made.restore()
    assert "forward" not in vars(model)
    assert torch.equal(ours, model.generate(**call))


def test_a_model_that_is_fastest_as_it_is_does_not_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager_wins(calls: Any, *_: Any, **__: Any) -> dict[str, tuple[float, ...]]:
        return {name: ((1e-9 if name == "eager" else 9e-9),) * 4 for name in calls}

    monkeypatch.setattr("intarsia.choose.race.race_plans", eager_wins)
    model = smallest()
    call = {"input_ids": padded()["input_ids"][1:], "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(**call)
    options: dict[str, Any] = {"partition": intarsia.Measured(budget_s=60, candidates=())}
    with intarsia.compile_generation(model, max_length=16, **options) as made:
        assert made.forward.by_rows[1].token.plan.findings.chosen == "eager"
        before = dict(made.forward.runs)  # of the check when it was made
        assert torch.equal(made.generate(**call), expected)
        ran = {kind: count - before[kind] for kind, count in made.forward.runs.items()}
        assert ran == {"prompt": 1, "token": 4, "own": 0}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"max_length": "a"}, "max_length is 'a'"),
        ({"max_length": 16.5}, "max_length is 16.5"),
        ({"batch": 2.0}, "batch is 2.0"),
        ({"batch": True}, "batch is True"),
        ({"batch": None}, "batch is None"),
        ({"max_source": "a"}, "max_source is 'a'"),
        ({"padding": "no"}, "padding is 'no'"),
        ({"examples": 5}, "examples are 5"),
        ({"engines": ["nope"]}, "nope"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(IntarsiaError, match=told):
        intarsia.compile_generation(tiny("llama"), **({"max_length": 16} | wrong))


@pytest.mark.filterwarnings("ignore:.*no position_ids are passed")
@pytest.mark.parametrize("kind", ["opt", "roberta"])
@torch.no_grad()
def test_positions_that_are_not_given_are_the_models(kind: str) -> None:
    """OPT counts what the mask shows, RoBERTa begins behind its padding id."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    made: dict[str, Callable[[], Any]] = {
        "opt": lambda: OPTForCausalLM(OPTConfig(word_embed_proj_dim=32, ffn_dim=48, **sizes)),
        "roberta": lambda: RobertaForCausalLM(RobertaConfig(intermediate_size=48, is_decoder=True, **sizes)),
    }
    torch.manual_seed(0)
    model = made[kind]().eval()
    for weight in model.parameters():
        weight.mul_(10 if weight.ndim > 1 else 1)
    ids, token = torch.randint(5, 90, (2, 6)), torch.tensor([[7], [8]])
    padded = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])

    def answers(mask: torch.Tensor | None) -> torch.Tensor:
        first = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        longer = None if mask is None else torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        second = model(token, attention_mask=longer, past_key_values=first.past_key_values, use_cache=True)
        return torch.stack([first.logits[:, -1], second.logits[:, -1]])

    masks = (None, torch.ones_like(ids), padded)
    expected = [answers(mask) for mask in masks]
    with intarsia.compile_generation(model, max_length=16, batch=2, engines="onnxruntime") as fast:
        before = dict(fast.forward.runs)
        for mask, truth in zip(masks, expected, strict=True):
            torch.testing.assert_close(answers(mask), truth, atol=1e-4, rtol=1e-3)
        ran = fast.forward.runs["token"] - before["token"]
    assert ran == (2 if kind == "opt" else 0), "where it counts tokens, programs answer"


def test_a_copy_of_the_model_runs_as_it_is(tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7]])
    with intarsia.compile_generation(tiny("llama"), max_length=16, engines="onnxruntime") as made:
        expected = made.generate(ids, max_new_tokens=4, do_sample=False)
        with pytest.warns(UserWarning, match="a copy of LlamaForCausalLM is not compiled"):
            copied = copy.deepcopy(made.model)
        with pytest.warns(UserWarning, match="a copy of LlamaForCausalLM is not compiled"):
            torch.save(made.model, tmp_path / "model.pt")
        again: Any = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (copied, again):
            assert other.forward.__self__ is other
            assert torch.equal(other.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_compiled_twice_and_restored_once() -> None:
    model, ids = tiny("llama"), torch.tensor([[5, 6, 7]])
    with intarsia.compile_generation(model, max_length=16, engines="onnxruntime") as first:
        before = first.forward.runs["token"]
        with intarsia.compile_generation(model, max_length=12, engines="onnxruntime"):
            assert model.forward is not first.forward
            with pytest.warns(UserWarning, match="is not compiled"):
                copied = copy.deepcopy(model)
            assert copied.forward.__self__ is copied
        assert model.forward is first.forward and first.forward.enabled
        assert first.forward.runs["token"] == before, "the second is compared with the model itself"
        model.generate(ids, max_new_tokens=3, do_sample=False)
        assert first.forward.runs["token"] > before
    assert "forward" not in vars(model)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(InputError, match="takes a transformers model that generates, not a Linear"):
        intarsia.compile_generation(torch.nn.Linear(1, 1), max_length=16)
    with pytest.raises(InputError, match="max_length is 3"):
        intarsia.compile_generation(tiny("llama"), max_length=3)
    with pytest.raises(InputError, match="max_length is 513, and GPT2LMHeadModel ends at 512"):
        intarsia.compile_generation(tiny("gpt2"), max_length=513)
    rotary = tiny("llama")
    rotary.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(InputError, match="of kind 'dynamic', which change with the length"):
        intarsia.compile_generation(rotary, max_length=16)
    with pytest.raises(InputError, match="is in training"):
        intarsia.compile_generation(tiny("llama").train(), max_length=16)

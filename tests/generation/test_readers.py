"""`generate` on a compiled encoder and decoder: the same tokens as before, however it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.generation.readers import FAMILIES, reading, tiny
from tests.generation.test_families import LINE_UPS, compare_long_answers
from tests.generation.test_generate import Ear, both
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

import intarsia
from intarsia.errors import InputError
from intarsia.generation import Generation

pytestmark = pytest.mark.slow

ROOM, SOURCE = 30, 20
VARIED = {"do_sample": False, "no_repeat_ngram_size": 2}  # random weights like to repeat one token


@pytest.fixture(scope="module")
def bart() -> Iterator[Generation]:
    model = tiny("bart")
    with intarsia.compile_generation(
        model, max_length=ROOM, max_source=SOURCE, batch=2, engines="onnxruntime"
    ) as made:
        yield made


def test_greedy_tokens_and_logits_are_the_models(bart: Generation) -> None:
    kinds = {**VARIED, "max_new_tokens": 25, "output_logits": True, "return_dict_in_generate": True}
    ours, own, runs = both(bart, **reading("bart"), **kinds)
    assert torch.equal(ours.sequences, own.sequences)
    assert len(set(own.sequences[1].tolist())) > 5  # not one token over and over
    for a, b in zip(ours.logits, own.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert runs == {"prompt": 1, "token": 24, "own": 0}
    assert type(ours.past_key_values) is EncoderDecoderCache
    encoder = bart.forward.encoder
    assert encoder is not None and encoder.runs["encoder"] and encoder.refused is None


@pytest.mark.parametrize(
    "kind",
    [
        {"do_sample": True, "top_k": 20, "temperature": 1.5},
        {"do_sample": False, "eos_token_id": list(range(60, 90)), "no_repeat_ngram_size": 1},
    ],
    ids=["sampling", "stopping"],
)
def test_sampling_and_stopping(bart: Generation, kind: dict[str, Any]) -> None:
    ours, own, runs = both(bart, **reading("bart"), max_new_tokens=15, **kind)
    assert torch.equal(ours, own) and runs["own"] == 0


@pytest.mark.parametrize("kind", [{}, {"do_sample": True}, {"num_return_sequences": 2}])
def test_beams_share_what_was_read(bart: Generation, kind: dict[str, Any]) -> None:
    ours, own, runs = both(bart, **reading("bart", 1), num_beams=2, max_new_tokens=12, **kind)
    assert torch.equal(ours, own) and runs["own"] == 0


def test_longer_and_shorter_one_after_the_other(bart: Generation) -> None:
    for length, prompt in ((SOURCE, 12), (2, 1), (7, 2), (SOURCE, 1), (3, 5)):
        told = torch.full((2, prompt), 2).cumsum(1)
        ours, own, runs = both(
            bart, **reading("bart", length=length), decoder_input_ids=told, max_new_tokens=8, **VARIED
        )
        assert torch.equal(ours, own), (length, prompt)
        assert runs["own"] == 0


def test_what_no_program_was_compiled_for(bart: Generation) -> None:
    with pytest.warns(UserWarning, match="reaches token 31, and max_length is 30"):
        ours, own, runs = both(bart, **reading("bart"), max_new_tokens=33, **VARIED)
    assert torch.equal(ours, own) and runs["own"] == 33 - ROOM
    with pytest.warns(UserWarning, match=r"the encoder has 21 states; compiled for 20 \(max_source\)"):
        ours, own, runs = both(bart, **reading("bart", length=21), max_new_tokens=4, **VARIED)
    assert torch.equal(ours, own) and runs == {"prompt": 0, "token": 0, "own": 4}
    with pytest.warns(UserWarning, match="it has 3 rows; compiled for 2"):
        ours, own, runs = both(bart, **reading("bart", 3), max_new_tokens=3, **VARIED)
    assert torch.equal(ours, own) and runs["own"] == 3
    call = {"input_ids": torch.tensor([[5], [9]]), "max_new_tokens": 6}
    ours, own, _ = both(bart, **call, **VARIED)  # a source of one token: whoever runs it
    assert torch.equal(ours, own)


def test_states_are_read_twice_and_padding_throughout_is_pytorchs(bart: Generation) -> None:
    model: Any = bart.model
    call = reading("bart")
    with torch.no_grad():
        states = model.get_encoder()(**call)
    before = states.last_hidden_state.clone()
    for length in (12, 5):
        told = {"attention_mask": call["attention_mask"], "encoder_outputs": states}
        ours, own, runs = both(bart, **told, max_new_tokens=length, **VARIED)
        assert torch.equal(ours, own) and runs["own"] == 0
    assert torch.equal(states.last_hidden_state, before)
    empty = call["attention_mask"] * torch.tensor([[0], [1]])
    with pytest.warns(UserWarning, match="padding only"):
        ours, own, runs = both(bart, attention_mask=empty, encoder_outputs=states, max_new_tokens=3, **VARIED)
    assert torch.equal(ours, own) and runs["own"] == 3


def test_the_cache_may_change_hands_at_any_token(bart: Generation) -> None:
    _change_hands(bart, "bart")


def _change_hands(made: Generation, family: str) -> None:
    model: Any = made.model
    own: Any = made.forward.own
    call = reading(family)
    told: dict[str, Any] = {name: call[name] for name in ("attention_mask",) if name in call}
    with torch.no_grad():
        states = model.get_encoder()(**call).last_hidden_state
        for first in (0, 1):
            truth, ours = (
                EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
                for _ in range(2)
            )
            ids = torch.tensor([[2, 7, 9], [2, 8, 5]])
            for step in range(8):
                kinds = {"decoder_input_ids": ids, **told, "encoder_outputs": (states,)}
                expected = own(**kinds, past_key_values=truth)
                made.enable(step % 3 != first)
                found = model(**kinds, past_key_values=ours)
                torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
                assert found.encoder_last_hidden_state is expected.encoder_last_hidden_state
                if step == 4:
                    for cache in (truth, ours):
                        cache.reorder_cache(torch.tensor([1, 0]))
                    told = {name: mask.flip(0) for name, mask in told.items()}
                    states = states.flip(0)
                if step == 5:
                    for cache in (truth, ours):
                        cache.self_attention_cache.crop(-2)
                if step == 6 and _empties():  # a second sentence in the same cache
                    for cache in (truth, ours):
                        cache.reset()
                ids = expected.logits[:, -1].argmax(-1, keepdim=True)
            assert truth.get_seq_length() == ours.get_seq_length()
    made.enable()


def _empties() -> bool:
    """Whether `reset` empties a cache: that of transformers 5.17 leaves zeros, to which models append."""
    layer = DynamicLayer()
    layer.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    layer.reset()
    return layer.get_seq_length() == 0


def test_streaming_and_tuples(bart: Generation) -> None:
    model: Any = bart.model
    ear = Ear()
    made = model.generate(**reading("bart", 1), max_new_tokens=4, streamer=ear, **VARIED)
    assert ear.heard == made[0].tolist()
    states = torch.zeros(2, 3, 64)
    with torch.no_grad():
        told = {"decoder_input_ids": torch.tensor([[2, 3], [2, 4]]), "encoder_outputs": (states,)}
        before = bart.forward.runs["own"]
        logits, cache, kept = model(**told, use_cache=True, return_dict=False)
    assert bart.forward.runs["own"] == before
    assert logits.shape == (2, 2, 128) and cache.get_seq_length() == 2 and kept is states


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_other_families(family: str) -> None:
    with intarsia.compile_generation(tiny(family), max_length=16, batch=2, engines="onnxruntime") as made:
        call = {**reading(family), **VARIED}
        ours, own, runs = both(made, **call, max_new_tokens=14)
        assert torch.equal(ours, own) and runs["own"] == 0
        ours, own, runs = both(made, **reading(family, 1), num_beams=2, max_new_tokens=6)
        assert torch.equal(ours, own) and runs["own"] == 0
        encoder = made.forward.encoder
        assert encoder is not None and encoder.refused is None
        _change_hands(made, family)
    assert "forward" not in vars(made.model) and "forward" not in vars(made.model.get_encoder())  # type: ignore[operator]


def test_weights_that_change_are_the_models() -> None:
    model = tiny("bart")
    call = {**reading("bart", 1), "max_new_tokens": 5, **VARIED}
    made = intarsia.compile_generation(model, max_length=16, engines="pytorch")
    with torch.no_grad():
        model.get_encoder().layernorm_embedding.weight.neg_()
    with pytest.warns(UserWarning, match=r"layernorm_embedding\.weight"):
        ours = made.generate(**call)
    made.restore()
    assert torch.equal(ours, model.generate(**call))


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(InputError, match="max_length is 257, and BartForConditionalGeneration ends at 256"):
        intarsia.compile_generation(tiny("bart"), max_length=257)
    with pytest.raises(InputError, match="reads no 300 tokens"):
        intarsia.compile_generation(tiny("bart"), max_length=16, max_source=300)
    with pytest.raises(
        InputError, match="max_source is 9, and WhisperForConditionalGeneration reads 12 always"
    ):
        intarsia.compile_generation(tiny("whisper"), max_length=16, max_source=9)
    with pytest.raises(InputError, match="max_source is 0"):
        intarsia.compile_generation(tiny("t5"), max_length=16, max_source=0)


@pytest.mark.full
@pytest.mark.parametrize("line_up", LINE_UPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_tokens(family: str, line_up: str) -> None:
    model = tiny(family, layers=2)
    call: dict[str, Any] = {
        **reading(family),
        **VARIED,
        "max_new_tokens": 200,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    compare_long_answers(model, call, 202, line_up)

"""Several tokens after those in a cache: a second turn, assisted decoding and prompt lookup run compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.generation import readers
from tests.generation.families import tiny
from transformers import DynamicCache

import intarsia
from intarsia.errors import InputError
from intarsia.generation import Generation

ROOM = 48


def compiled(family: str, **options: Any) -> Generation:
    return intarsia.compile_generation(
        tiny(family), max_length=ROOM, continued=True, **{"engines": "pytorch", **options}
    )


def two_turns(model: Any, rows: int, padded: bool) -> torch.Tensor:
    ids = torch.randint(3, 128, (rows, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    cache = DynamicCache(config=model.config)
    asked: dict[str, Any] = {"past_key_values": cache, "do_sample": False, "pad_token_id": 0}
    first = model.generate(ids[:, :9] * mask[:, :9], attention_mask=mask[:, :9], max_new_tokens=5, **asked)
    again = torch.cat([first, ids[:, 9:]], 1)
    mask = torch.cat([mask[:, :9], torch.ones(rows, again.shape[1] - 9, dtype=torch.long)], 1)
    answer: torch.Tensor = model.generate(again, attention_mask=mask, max_new_tokens=6, **asked)
    return answer


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_second_turn(family: str, rows: int) -> None:
    with compiled(family, batch=rows) as made:
        assert made.forward.enabled, made.notes
        before = made.forward.runs["continued"]
        tokens = two_turns(made.model, rows, padded=rows > 1)
        assert made.forward.runs["own"] == 0
        assert made.forward.runs["continued"] == before + 1
        made.enable(False)
        assert torch.equal(tokens, two_turns(made.model, rows, padded=rows > 1))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "inductor"])
def test_engines(engine: str) -> None:
    with compiled("llama", engines=engine) as made:
        tokens = two_turns(made.model, 1, padded=False)
        assert made.forward.runs["own"] == 0
        program = made.forward.by_rows[1].continued
        assert program is not None and engine in program.plan.engines
        made.enable(False)
        assert torch.equal(tokens, two_turns(made.model, 1, padded=False))


def test_assisted_decoding_and_prompt_lookup() -> None:
    with compiled("llama") as made:
        ids = torch.tensor([[5, 9, 7, 11, 5, 9, 7]])
        asked: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
        ways: list[dict[str, Any]] = [{"assistant_model": tiny("llama")}, {"prompt_lookup_num_tokens": 3}]
        before = made.forward.runs["continued"]
        answers = [made.model.generate(ids, **asked, **way) for way in ways]
        assert made.forward.runs["own"] == 0
        assert made.forward.runs["continued"] > before + 2
        made.enable(False)
        expected = made.model.generate(ids, **asked)
        assert all(torch.equal(answer, expected) for answer in answers)


def test_without_the_program_a_warning_names_it() -> None:
    with intarsia.compile_generation(tiny("llama"), max_length=ROOM, engines="pytorch") as made:
        with pytest.warns(UserWarning, match="9 new tokens after 13 in the cache .continued=True"):
            two_turns(made.model, 1, padded=False)
        assert made.forward.runs["own"] == 1


def test_a_model_with_an_encoder_is_refused() -> None:
    with pytest.raises(InputError, match="continued=True is for decoders, and T5For"):
        intarsia.compile_generation(readers.tiny("t5"), max_length=ROOM, continued=True, engines="pytorch")


def test_a_file_holds_the_program(tmp_path: Path) -> None:
    with compiled("llama", engines="onnxruntime") as made:
        intarsia.generation.save(made, tmp_path / "llama.generation")
        expected = two_turns(made.model, 1, padded=False)
    with intarsia.generation.load(tmp_path / "llama.generation", tiny("llama")) as loaded:
        assert torch.equal(two_turns(loaded.model, 1, padded=False), expected)
        assert loaded.forward.runs["own"] == 0

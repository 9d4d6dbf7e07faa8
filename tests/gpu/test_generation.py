"""`generate` on a compiled decoder on a CUDA device: the tokens of eager, each token one CUDA graph."""

from __future__ import annotations

import pytest
import torch
from tests.generation.families import tiny

import intarsia

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_are_eagers(family: str) -> None:
    model = tiny(family).cuda()
    ids = torch.randint(3, 128, (2, 9), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids * mask, **asked)
    with intarsia.compile_generation(model, max_length=40, batch=2, engines=["inductor"]) as made:
        for _ in range(2):
            assert torch.equal(model.generate(ids * mask, **asked), expected)
        assert made.forward.runs["own"] == 0
        assert made.forward.by_rows[2].token.plan.engines == ("inductor",)
        assert not any("CUDA graph" in note for note in made.forward.by_rows[2].token.notes)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampled_tokens_are_eagers(rows: int, dtype: torch.dtype) -> None:
    """In bfloat16 ties are settled by the last bit, so only where rows end is asked."""
    model = tiny("llama").cuda().to(dtype)
    ids = torch.randint(3, 128, (rows, 9), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    asked = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    asked |= {"repetition_penalty": 1.1, "eos_token_id": [60, 61], "pad_token_id": 0}
    torch.manual_seed(0)
    expected = model.generate(ids, **asked)
    with intarsia.compile_generation(
        model, max_length=40, batch=rows, padding=False, engines=["inductor"]
    ) as made:
        assert made.forward.loop is not None
        for _ in range(2):
            torch.manual_seed(0)
            found = model.generate(ids, **asked)
            if dtype == torch.float32:
                assert torch.equal(found, expected)
            new = found[:, 9:]
            ended = torch.isin(new, torch.tensor([60, 61], device="cuda")).cummax(1).values
            assert bool((new[:, 1:][ended[:, :-1]] == 0).all())
        assert made.forward.runs["own"] == 0


def test_a_second_turn_is_eagers() -> None:
    from transformers import DynamicCache

    model = tiny("llama").cuda()
    drawn = torch.randint(3, 128, (1, 14), device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def turns() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        asked = {"past_key_values": cache, "max_new_tokens": 5, "do_sample": False}
        first = model.generate(drawn[:, :9], **asked)
        return model.generate(torch.cat([first, drawn[:, 9:]], 1), **asked)

    expected = turns()
    with intarsia.compile_generation(model, max_length=40, continued=True, engines=["inductor"]) as made:
        for _ in range(2):
            assert torch.equal(turns(), expected)
        assert made.forward.runs["own"] == 0

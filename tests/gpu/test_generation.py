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
        assert not any("CUDA graph" in note for note in made.forward.by_rows[2].token.notes)

"""Every family of decoders, on each engine and mixed: 200 greedy tokens and their logits are the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.generation.families import FAMILIES, tiny

import intarsia

LINE_UPS: dict[str, dict[str, Any]] = {
    "onnxruntime": {"engines": "onnxruntime"},
    "openvino": {"engines": "openvino"},
    "pytorch": {"engines": "pytorch"},
    # products on one engine, sums on the other, and the rest in PyTorch
    "mixed": {
        "engines": ["onnxruntime", "openvino"],
        "min_block_size": 1,
        "backend_support_map": {
            "onnxruntime": ["aten.linear.default"],
            "openvino": ["aten.add.Tensor", "aten.mul.Tensor"],
        },
    },
}


def compare_long_answers(model: Any, call: dict[str, Any], room: int, line_up: str) -> None:
    """Tokens and logits of `generate`, compiled on these engines and as it was."""
    own = model.generate(**call)
    with intarsia.compile_generation(model, max_length=room, batch=2, **LINE_UPS[line_up]) as made:
        ours = model.generate(**call)
        assert not made.notes and made.forward.enabled
        assert made.forward.runs["own"] == 0
        engines = made.forward.by_rows[2].token.plan.engines
        assert {line_up} <= {*engines, "mixed"}
        assert line_up != "mixed" or set(engines) == {"onnxruntime", "openvino", "pytorch"}
    assert torch.equal(ours.sequences, own.sequences)
    for a, b in zip(ours.logits, own.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("line_up", LINE_UPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_tokens(family: str, line_up: str) -> None:
    model = tiny(family)
    ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    call: dict[str, Any] = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "max_new_tokens": 200,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    compare_long_answers(model, call, 208, line_up)

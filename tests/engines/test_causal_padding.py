"""A mask of padding and of later positions is taken apart for the kernel that knows both."""

from __future__ import annotations

import pytest
import torch
from tests.generation.families import tiny
from torch.export import Dim

from intarsia.capture.export import capture
from intarsia.convert import registry
from intarsia.engines.graph_rewrites.fused_products import _without_causal
from intarsia.engines.triton_kernels.operators import masked_attention
from intarsia.lower.index_values import IndexValues
from intarsia.lower.lowering import lower
from intarsia.lower.purity import arguments

SDPA = torch.ops.aten.scaled_dot_product_attention.default


class Masked(torch.nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.model = tiny(family)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("varies", [False, True])
def test_decoders_have_one_row_of_padding(family: str, varies: bool) -> None:
    ids = torch.randint(3, 100, (3, 20))
    mask = (torch.arange(20) < torch.tensor([[20], [7], [13]])).long()
    shapes = ({1: Dim("length", min=2, max=40)},) * 2 if varies else None
    module = lower(capture(Masked(family), (ids, mask), dynamic_shapes=shapes), registry.__contains__).module
    values = IndexValues(module)
    masks = [arguments(node)["attn_mask"] for node in module.graph.nodes if node.target is SDPA]
    assert masks
    for both in masks:
        padding, is_causal = _without_causal(module, values, both)
        assert is_causal
        assert padding.meta["val"].shape[2] == 1


def test_padding_alone_is_left() -> None:
    class Padded(torch.nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, q, q, mask & (mask.sum(-2) > 0)[..., None, :]
            )

    example = (torch.randn(2, 2, 5, 16), torch.rand(2, 1, 5, 5) > 0.3)
    module = lower(capture(Padded(), example), registry.__contains__).module
    (mask,) = (arguments(node)["attn_mask"] for node in module.graph.nodes if node.target is SDPA)
    assert _without_causal(module, IndexValues(module), mask) == (mask, False)


@pytest.mark.parametrize("numbers", [False, True])
def test_the_operator_hides_later_places_too(numbers: bool) -> None:
    q = torch.randn(2, 2, 5, 16)
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
    mask = torch.where(padding, 0.5, -torch.inf) if numbers else padding
    both = padding & torch.ones(5, 5, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, both, scale=0.3)
    torch.testing.assert_close(masked_attention(q, q, q, mask, 0.3, True), expected)

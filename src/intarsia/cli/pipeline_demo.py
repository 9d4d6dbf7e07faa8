"""What `intarsia pipeline run` trains without a model: a small language model with tied weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from intarsia.cli.pipeline_model import Batch, Job, next_token_loss


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self, vocabulary: int = 256, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of the next token at every place."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def make_demo(microbatches: int) -> Job:
    """The model and one batch of random tokens."""
    torch.manual_seed(0)
    model, ids = TinyGPT(), torch.randint(0, 256, (4 * microbatches, 32))
    return Job(model, lambda step: Batch((ids,), ids), next_token_loss, compare=True)

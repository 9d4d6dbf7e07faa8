"""Ordinary programs: attention with masks, recurrence, control flow that follows data."""

from __future__ import annotations

import torch
from tests.models.case import Call, Case, program_list
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CASES: list[Case] = []
_program = program_list(CASES)


@_program("nn.TransformerEncoder with a padding mask")
def _encoder() -> Call:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[1, -4:] = True
    model = nn.TransformerEncoder(layer, 2)
    return Call(model, (torch.randn(2, 10, 32),), {"src_key_padding_mask": padding})


@_program("nn.Transformer with causal and padding masks")
def _transformer() -> Call:
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[0, -2:] = True
    kwargs = {
        "tgt_mask": torch.ones(6, 6, dtype=torch.bool).triu(1),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    return Call(model, (torch.randn(2, 8, 32), torch.randn(2, 6, 32)), kwargs)


@_program("nn.MultiheadAttention with weights per head")
def _attention() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True)

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.attention(q, k, k, average_attn_weights=False)

    return Call(Model(), (torch.randn(2, 5, 32), torch.randn(2, 7, 32)))


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out)


@_program("LSTM over a packed sequence")
def _packed() -> Call:
    return Call(_Packed(), (torch.randint(0, 50, (3, 9)), torch.tensor([5, 9, 2])))


@_program("GRU, two directions, a state given")
def _gru() -> Call:
    return Call(nn.GRU(8, 16, 2, bidirectional=True), (torch.randn(7, 2, 8), torch.randn(4, 2, 16)))


@_program("LSTM cells in a Python loop")
def _cells() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = c = x.new_zeros(x.shape[0], 16)
            for step in x.unbind(1):
                h, c = self.cell(step, (h, c))
            return self.head(h)

    return Call(Model(), (torch.randn(2, 6, 8),))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
        self.left = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.left(x) if x.sum() > 0 else self.right(x)


@_program("a branch on data")
def _branch() -> Call:
    return Call(_Gate(), (torch.randn(4, 8),))


@_program("a loop that ends by data")
def _loop() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            count = 0
            while x.norm().item() > 0.5 and count < 6:
                x, count = self.step(x), count + 1
            return x, count

    return Call(Model(), (torch.randn(2, 8),))


@_program("early exit by confidence")
def _exits() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))
                for _ in range(3)
            )
            self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage, head in zip(self.stages, self.heads, strict=True):
                x = stage(x)
                answer = head(x).softmax(-1)
                if float(answer.max()) > 0.9:
                    return answer
            return answer

    return Call(Model(), (torch.randn(1, 16),))

"""Linear layers in the layouts of published quantized weights, written with plain torch operators."""

from __future__ import annotations

import torch
from torch import nn

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in the nibbles of an int32


def _packed(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Numbers of 4 bits along the last dimension, eight to an int32."""
    nibbles = numbers.long().unflatten(-1, (-1, 8))[..., list(order)]
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class Awq(nn.Module):
    """int32 of (columns, rows / 8), the nibbles in AWQ's order; zero points likewise; scales by groups."""

    def __init__(self, columns: int, rows: int, group: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rows, self.group = rows, group
        zeros = torch.randint(0, 16, (columns // group, rows))
        self.register_buffer("qweight", _packed(torch.randint(0, 16, (columns, rows)), AWQ_ORDER))
        self.register_buffer("qzeros", _packed(zeros, AWQ_ORDER))
        self.register_buffer("scales", (torch.rand(columns // group, rows) / columns).to(dtype))
        self.register_buffer("shifts", 4 * torch.tensor(AWQ_ORDER).argsort())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, zeros = (
            ((words[:, :, None] >> self.shifts) & 15).reshape(-1, self.rows)
            for words in (self.qweight, self.qzeros)
        )
        zeros, scales = (each.repeat_interleave(self.group, 0) for each in (zeros, self.scales))
        return x @ ((weight - zeros) * scales)


class Gptq(nn.Module):
    """int32 of (columns / 8, rows); the group of each column by `g_idx`, which act-order permutes."""

    def __init__(
        self, columns: int, rows: int, group: int, act_order: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        groups = torch.arange(columns) // group
        self.register_buffer("g_idx", (groups[torch.randperm(columns)] if act_order else groups).int())
        self.register_buffer("qweight", _packed(torch.randint(0, 16, (rows, columns))).t().contiguous())
        self.register_buffer("qzeros", _packed(torch.randint(0, 15, (columns // group, rows))))
        self.register_buffer("scales", (torch.rand(columns // group, rows) / columns).to(dtype))
        self.register_buffer("shifts", 4 * torch.arange(8, dtype=torch.int32))
        self.bias = nn.Parameter(torch.randn(rows, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = ((self.qweight[:, None, :] >> self.shifts[None, :, None]) & 15).flatten(0, 1)
        zeros = (((self.qzeros[:, :, None] >> self.shifts) & 15) + 1).flatten(1)
        places = self.g_idx.long()
        weight = self.scales[places] * (weight - zeros[places])
        return nn.functional.linear(x, weight.t().to(x.dtype), self.bias)


class Compressed(nn.Module):
    """int32 of (rows, columns / 8), or int8 as it is; symmetric, scales of (rows, groups)."""

    def __init__(
        self, columns: int, rows: int, group: int, bits: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.bits, self.group = bits, group
        if bits == 4:
            self.register_buffer("weight_packed", _packed(torch.randint(0, 16, (rows, columns))))
        else:
            self.register_buffer("weight", torch.randint(-128, 128, (rows, columns), dtype=torch.int8))
        self.register_buffer("weight_scale", (torch.rand(rows, columns // group) / columns).to(dtype))

    def integers(self) -> torch.Tensor:
        if self.bits == 8:
            return self.weight
        shifts = 4 * torch.arange(8, dtype=torch.int32)
        return (((self.weight_packed[:, :, None] >> shifts) & 15) - 8).flatten(1).to(torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.integers().unflatten(1, (-1, self.group)).to(self.weight_scale.dtype)
        return nn.functional.linear(x, (groups * self.weight_scale[:, :, None]).flatten(1))


class Shifted(Compressed):
    """int8 with a zero point of int8 for each row: their differences have 9 bits."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, columns, 8)
        self.register_buffer("zeros", torch.randint(-128, 128, (rows, 1), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight.float() - self.zeros.float()) * self.weight_scale)


class Unsigned(nn.Module):
    """uint8 with one scale and one zero point for all, as early quantizers write it."""

    def __init__(self, columns: int, rows: int, nibbles: bool) -> None:
        super().__init__()
        self.nibbles = nibbles
        self.register_buffer(
            "weight", torch.randint(0, 256, (rows, columns // (2 if nibbles else 1)), dtype=torch.uint8)
        )
        self.register_buffer("scale", torch.tensor(0.5 / columns))
        self.register_buffer("zero", torch.tensor(5, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.nibbles:
            weight = torch.stack([weight >> 4, weight & 15], -1).flatten(1)
        return x @ ((weight.float() - self.zero.float()) * self.scale).t()


class Lookup(nn.Module):
    """An embedding of 4 bits, and the same table as the last product."""

    def __init__(self, rows: int, columns: int, group: int, tied: bool) -> None:
        super().__init__()
        self.table, self.tied = Compressed(columns, rows, group, 4), tied

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        table = self.table
        groups = table.integers().unflatten(1, (-1, table.group)).float()
        weight = (groups * table.weight_scale[:, :, None]).flatten(1)
        rows = nn.functional.embedding(indices, weight)
        return rows.tanh() @ weight.t() if self.tied else rows


LAYOUTS = {
    "awq": lambda columns, rows: Awq(columns, rows, 32),
    "gptq": lambda columns, rows: Gptq(columns, rows, 32, act_order=False),
    "gptq in another order": lambda columns, rows: Gptq(columns, rows, 32, act_order=True),
    "compressed 4": lambda columns, rows: Compressed(columns, rows, 32, 4),
    "compressed 8": lambda columns, rows: Compressed(columns, rows, columns, 8),
    "compressed 8 in groups": lambda columns, rows: Compressed(columns, rows, 64, 8),
    "compressed 8 with zeros": lambda columns, rows: Shifted(columns, rows),
    "unsigned 8": lambda columns, rows: Unsigned(columns, rows, nibbles=False),
    "unsigned 4": lambda columns, rows: Unsigned(columns, rows, nibbles=True),
}

"""A run of the model for its answer alone leaves no trace, and copies no weights in few bits twice."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from intarsia.capture.protect import undisturbed
from intarsia.checkpoint.linear import PackedLinear
from intarsia.errors import CaptureError


class Counts(nn.Module):
    """Writes to a large buffer of integers from the n-th run on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.runs = first, [0]  # a list, which nobody puts back
        self.register_buffer("table", torch.zeros(1024, 1024, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs[0] += 1
        if self.runs[0] >= self.first:
            self.table.add_(1)
        return x + self.table[0, 0]


def test_large_integers_that_no_run_writes_to_are_not_copied() -> None:
    model, x = Counts(first=99), torch.zeros(1)
    for _ in range(2):
        with undisturbed(model) as held:
            model(x)
            assert held(model.table).data_ptr() == model.table.data_ptr()
    model.table.add_(1)  # a write of the user's
    model.first = 1
    with undisturbed(model) as held:
        assert model(x) == 2
        after = held(model.table)
    assert int(model.table.max()) == 1
    assert int(after.min()) == 2


def test_large_integers_that_every_run_writes_to_come_back() -> None:
    model = Counts(first=1)
    for _ in range(3):
        with undisturbed(model) as held:
            model(torch.zeros(1))
            after = held(model.table)
        assert int(model.table.max()) == 0
        assert int(after.min()) == 1


def test_large_integers_that_only_a_later_run_writes_to_are_an_error() -> None:
    model = Counts(first=2)
    with undisturbed(model):
        model(torch.zeros(1))
    with pytest.raises(CaptureError, match="large buffer of integers"), undisturbed(model):
        model(torch.zeros(1))


def test_packed_weights_of_a_checkpoint_are_not_copied_at_all() -> None:
    class Wrong(PackedLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight_packed.add_(1)
            return super().forward(x)

    for kind in (PackedLinear, Wrong):
        layer = kind(nn.Linear(1024, 1024, bias=False), 4, 128, {"weight_packed"}, True, False)
        with pytest.raises(CaptureError) if kind is Wrong else nullcontext(), undisturbed(layer) as held:
            layer(torch.zeros(1, 1024))
            assert held(layer.weight_packed).data_ptr() == layer.weight_packed.data_ptr()

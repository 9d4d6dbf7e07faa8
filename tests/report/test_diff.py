"""`diff` answers for models compiled as a whole, and refuses everything else in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError
from intarsia.report.diff import diff


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) if x.sum() > 0 else x


def test_segments_of_a_whole_model_agree() -> None:
    x = torch.randn(2, 4)
    report = diff(intarsia.compile(nn.Linear(4, 4), (x,), engines="onnxruntime", min_block_size=1), (x,))
    assert report.equal and [segment.engine for segment in report.segments] == ["onnxruntime"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: (nn.Linear(4, 4), (x,)), "a Linear has no segments"),
        (
            lambda x: (intarsia.compile(Decides(), (x,), engines="onnxruntime", min_block_size=1), (x,)),
            "a PartlyCompiled has no segments",
        ),
        (
            lambda x: (intarsia.compile(nn.Linear(4, 4), (x,), engines="onnxruntime"), x),
            "args must be a tuple",
        ),
    ],
)
def test_what_has_no_segments_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        diff(*make(torch.ones(2, 4)))

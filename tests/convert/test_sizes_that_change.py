"""Operators that make as many results, or as large ones, as a size says that varies."""

from __future__ import annotations

import pytest
import torch
from tests.functions import Function
from torch.export import Dim

import intarsia
from intarsia.errors import CaptureError

ROWS = {0: Dim("rows", min=2, max=9)}


def resized(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (x * 2).resize_(like.shape[0], 2) + 1


def test_what_torch_cannot_do_with_a_size_that_varies_is_told() -> None:
    """Export takes `resize_`, lowering fails in an assertion of torch: PyTorch runs it, with a note."""
    x = torch.rand(6, 3)
    fast = intarsia.compile(Function(resized), (x, x), dynamic_shapes=((ROWS, ROWS),))
    (note,) = [note for note in fast.notes if "cannot be lowered" in note]
    assert "resize_ to a size that varies" in note and "ASSERT" not in note
    for rows in (2, 6, 9):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(fast(x, x), resized(x, x))


def test_resize_to_a_fixed_size() -> None:
    x = torch.rand(6, 3)
    function = Function(lambda x: (x * 2).resize_(4, 3) + 1)
    fast = intarsia.compile(function, (x,), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(x), function(x))


def test_unbind_beside_a_size_that_varies() -> None:
    function = Function(lambda x: x.unbind(1)[0] * 2 + x.unbind(1)[1])
    fast = intarsia.compile(
        function, (torch.rand(6, 3),), dynamic_shapes=((ROWS,),), engines=["onnxruntime"], min_block_size=1
    )
    assert fast.plan.engines == ("onnxruntime",)
    for rows in (2, 6, 9):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(fast(x), function(x))


def test_unbind_of_the_size_that_varies_is_refused_with_torchs_advice() -> None:
    with pytest.raises(CaptureError, match=r"(?s)specialized it to be a constant \(6\).*Suggested fixes"):
        intarsia.compile(
            Function(lambda x: torch.stack(x.unbind(0)) * 2), (torch.rand(6, 3),), dynamic_shapes=((ROWS,),)
        )

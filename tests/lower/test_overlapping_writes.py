"""A write through an expanded view: as in eager, in PyTorch if need be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import intarsia
from intarsia.errors import LoweringError


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x)


def into_a_row(x: Tensor) -> Tensor:
    shown = x.unsqueeze(0).expand(2, 6)
    shown[1].mul_(1e-20)  # far below what a difference to the old value can tell
    return shown


def into_a_copy(x: Tensor) -> Tensor:
    copy = x.unsqueeze(0).expand(2, 6).contiguous()
    copy[1].mul_(1e-20)
    return copy


def into_one_row(x: Tensor) -> Tensor:
    return x.clone().unsqueeze(0).expand(1, 6).mul_(2)


def into_like_another(x: Tensor) -> Tensor:
    x.expand_as(torch.zeros(2, 6))[0].mul_(1e-20)
    return x + 1


def into_broadcast(x: Tensor) -> Tensor:
    torch.broadcast_to(x, (2, 6))[0].add_(1)
    return x.view(2, 3)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("write", [into_a_row, into_a_copy, into_one_row, into_like_another, into_broadcast])
def test_a_write_is_as_in_eager(write: Callable[[Tensor], Tensor], engine: str) -> None:
    x = torch.tensor([-torch.inf, torch.inf, 1.0, -2.0, 3e7, 0.5])
    fast = intarsia.compile(Writes(write), (torch.randn(6),), engines=[engine], min_block_size=1)
    ours, own = x.clone(), x.clone()
    assert torch.equal(fast(ours), write(own))
    assert torch.equal(ours, own)


def test_the_reason_is_told() -> None:
    with pytest.raises(LoweringError, match=r"mul_.*expand.*clone\(\) it"):
        intarsia.compile(Writes(into_a_row), (torch.randn(6),), fallback="error")
    assert not intarsia.compile(Writes(into_a_copy), (torch.randn(6),), fallback="error").notes


class Chooses(nn.Module):
    """A write like that inside a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: into_a_row(t.clone()) + 0, lambda t: t.repeat(2, 1), (x,))


def test_a_write_inside_a_branch_is_as_in_eager() -> None:
    x = torch.tensor([torch.inf, 1.0, 2.0, 3e7, 0.5, 1.0])
    fast = intarsia.compile(Chooses(), (torch.rand(6),), engines=["onnxruntime"], min_block_size=1)
    assert torch.equal(fast(x), Chooses()(x))

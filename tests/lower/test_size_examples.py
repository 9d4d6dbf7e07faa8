"""Bounded sizes are tried at both ends, as far as memory and the graph's conditions allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import intarsia
from intarsia.capture import capture
from intarsia.errors import CaptureError, InputError
from intarsia.lower import Lowered, lower, size_examples
from intarsia.lower.size_examples import between, corners


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()


def lowered_rows(low: int, high: int | None, model: nn.Module | None = None) -> tuple[Lowered, torch.Tensor]:
    x = torch.rand(4, 3)
    dim = Dim.DYNAMIC(min=low, max=high)
    return lower(capture(model or Rows(), (x,), dynamic_shapes=({0: dim},)), lambda target: True), x


def sizes(found: list[list[torch.Tensor]]) -> list[int]:
    return [inputs[0].shape[0] for inputs in found]


def test_both_ends_of_a_bounded_range_are_tried() -> None:
    lowered, x = lowered_rows(2, 500)
    assert sizes(corners(lowered, [x])) == [2, 500]


def test_sizes_between_the_ends_are_evenly_spread() -> None:
    lowered, x = lowered_rows(2, 500)
    assert sizes(between(lowered, [x], 2)) == [168, 334]
    fixed = lower(capture(Rows(), (x,)), lambda target: True)
    assert between(fixed, [x], 2) == []


def test_an_open_range_is_tried_at_a_multiple() -> None:
    lowered, x = lowered_rows(2, None)
    assert sizes(corners(lowered, [x])) == [2, 16]


def test_an_end_too_large_for_memory_is_told() -> None:
    lowered, x = lowered_rows(2, 1 << 20)
    notes: list[str] = []
    least, most = sizes(corners(lowered, [x], notes))
    assert least == 2 and 4 < most < 1 << 20
    assert most**2 * 4 <= size_examples.MOST_BYTES
    assert f"up to {most}, not 1048576" in notes[0] and "GiB" in notes[0]


class Even(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] % 2 == 0 else x - 1


def test_an_end_on_another_path_gives_way_to_its_neighbour() -> None:
    lowered, x = lowered_rows(3, 9, Even())
    assert sizes(corners(lowered, [x])) == [4, 8]


def test_what_fails_at_the_end_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention scores over 40 rows: the end is beyond four times the example, and is compared."""
    seen: list[int] = []
    plain = size_examples._resized

    def noting(value: torch.Tensor, *rest: object) -> torch.Tensor:
        made = plain(value, *rest)  # type: ignore[arg-type]
        seen.append(made.shape[0])
        return made

    monkeypatch.setattr(size_examples, "_resized", noting)
    intarsia.compile(Rows(), (torch.rand(4, 3),), dynamic_shapes=({0: Dim("rows", min=2, max=40)},))
    assert 40 in seen


@pytest.mark.parametrize("shapes", [{"tensors": ({0: "n"}, {0: "n"})}, (({0: "n"}, {0: "n"}),)])
def test_sizes_of_a_forward_that_takes_any_number_of_tensors(shapes: Any) -> None:
    class Several(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return tensors[0] + tensors[1].sum()

    size = torch.export.Dim("n", min=1, max=64)
    named = pytree.tree_map(lambda leaf: size if leaf == "n" else leaf, shapes)
    example = torch.randn(1, 3), torch.randn(1, 3)  # a size of 1 is looked at by itself
    fast = intarsia.compile(
        Several(), example, dynamic_shapes=named, engines=["onnxruntime"], min_block_size=1
    )
    call = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(fast(*call), Several()(*call))


@pytest.mark.parametrize("model", [nn.Conv3d(4, 4, 1), nn.Conv2d(4, 2, 1), nn.AvgPool3d(1)])
def test_a_declared_range_holds_at_both_ends(model: nn.Module) -> None:
    rank = 4 if isinstance(model, nn.Conv2d) else 5
    least, usual, most = ((n, 4, *[m] * (rank - 2)) for n, m in ((1, 1), (2, 4), (4, 8)))
    model.eval()
    described = intarsia.Input(min_shape=least, opt_shape=usual, max_shape=most)
    fast = intarsia.compile(model, (described,), engines=["onnxruntime"], min_block_size=1)
    for shape in (least, usual, most):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-5)


class OneByOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] * x.shape[1] == 1 else x + 1


class Folded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(3, 2)


def test_an_end_that_calls_may_not_have_is_told_at_compile() -> None:
    described = intarsia.Input(min_shape=(1, 1), opt_shape=(2, 4), max_shape=(4, 4))
    fast = intarsia.compile(OneByOne(), (described,))
    assert any("are refused: conditions of the exported model exclude them" in note for note in fast.notes)
    with pytest.raises(InputError, match="another branch"):
        fast(torch.ones(1, 1))


@pytest.mark.parametrize("low", [3, 6])
def test_a_range_that_cannot_be_is_an_error_at_compile(low: int) -> None:
    with pytest.raises(CaptureError, match=r"constant \(6\)"):
        intarsia.compile(Folded(), (torch.rand(6),), dynamic_shapes={"x": {0: Dim("n", min=low, max=9)}})
    with pytest.raises(CaptureError, match=r"constant \(6\)"):
        intarsia.compile(Folded(), (intarsia.Input(min_shape=(low,), opt_shape=(6,), max_shape=(9,)),))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, mode="sum")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.table(ids, offsets)  # type: ignore[no-any-return]


def test_offsets_stay_sorted() -> None:
    model, ids, offsets = Bags().eval(), torch.arange(9), torch.tensor([0, 4, 7])
    varying = {"ids": {0: torch.export.Dim.AUTO}, "offsets": {0: torch.export.Dim.AUTO}}
    fast = intarsia.compile(
        model, (ids, offsets), dynamic_shapes=varying, engines=["onnxruntime"], min_block_size=1
    )
    assert fast.plan.engines == ("onnxruntime",), fast.notes
    for call in ((torch.arange(5), torch.tensor([0, 2])), (torch.arange(20), torch.arange(0, 20, 2))):
        torch.testing.assert_close(fast(*call), model(*call))

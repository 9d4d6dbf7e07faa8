"""Results lie in memory as the model's do: what works on its result works on ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.archive.call import layouts_from_json, views_from_json
from intarsia.backend import intarsia_backend
from intarsia.errors import ArchiveError
from intarsia.lower.result_memory import laid_out, layout_of

ENGINES = ["onnxruntime", "openvino", "pytorch", "inductor"]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.conv(x))
        rows = y.flatten(2).mean(-1).t() * 2  # of a transpose
        return y, y.permute(0, 2, 3, 1), rows, rows, y.mean((2, 3))


def image(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("engine", ENGINES)
def test_strides_are_the_models(engine: str) -> None:
    model, x = Images().eval(), image(2)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    with torch.no_grad():
        for made, truth in zip(fast(x), model(x), strict=True):
            assert made.stride() == truth.stride()
            torch.testing.assert_close(made, truth, atol=1e-5, rtol=1e-4)
    y, last, rows, again, _ = fast(x)
    assert rows is again
    assert last.data_ptr() == y.data_ptr(), "the second result is a view of the first"
    assert last.view(-1).shape == (2 * 6 * 5 * 4,)


def test_one_result_and_sizes_that_vary() -> None:
    model = nn.Conv2d(3, 4, 3, padding=1).eval()
    sizes = ({0: Dim("batch", min=1, max=8)},)
    fast = intarsia.compile(model, (image(2),), dynamic_shapes=sizes, engines=["onnxruntime"])
    for batch in (1, 2, 5):
        with torch.no_grad():
            made, truth = fast(image(batch)), model(image(batch))
        assert made.shape == truth.shape
        assert made.is_contiguous(memory_format=torch.channels_last)
        made.permute(0, 2, 3, 1).view(-1)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_file_keeps_layouts_and_views(engine: str, tmp_path: Path) -> None:
    class Views(Images):
        def forward(self, x: torch.Tensor) -> Any:
            return *super().forward(x), x.permute(0, 2, 3, 1).reshape(x.shape[0], -1)

    model, x = Views().eval(), image(2)
    intarsia.save(intarsia.compile(model, (x,), engines=[engine]), tmp_path / "model.intarsia")
    loaded = intarsia.load(tmp_path / "model.intarsia")
    made = loaded(x)
    with torch.no_grad():
        assert [y.stride() for y in made] == [y.stride() for y in model(x)]
    assert made[-1].data_ptr() == x.data_ptr()
    assert made[1].data_ptr() == made[0].data_ptr()


def test_a_graph_break_behind_a_result_sees_its_strides() -> None:
    model = nn.Conv2d(3, 4, 3, padding=1).eval()

    def function(x: torch.Tensor) -> Any:
        y = model(x)
        torch._dynamo.graph_break()
        return y.permute(0, 2, 3, 1).view(-1), y.stride()

    options: Any = {"engines": ["onnxruntime"]}
    quick = torch.compile(function, backend=intarsia_backend, options=options)
    x = image(2)
    with torch.no_grad():
        (made, strides), (truth, expected) = quick(x), function(x)
    assert strides == expected
    torch.testing.assert_close(made, truth, atol=1e-5, rtol=1e-4)


class Special(nn.Module):
    """Results whose last operator runs in PyTorch, and parts of images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.special.i0(self.line(x[:, 0, 0]))
        return y.t().contiguous(), self.conv(x)[:, :, 1:5], (self.conv(x) + 1)[:, 1:]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_can_be_viewed_in_the_model_can_be_viewed_in_ours(engine: str) -> None:
    model, x = Special().eval(), image(2)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    for call in (model, fast):
        with torch.no_grad():
            turned, rows, channels = call(x)
        assert turned.view(-1).shape == (12,)
        assert rows.permute(0, 2, 3, 1).view(2, 4, 20).shape == (2, 4, 20)
        assert channels.permute(0, 2, 3, 1).reshape(2, -1).shape == (2, 90)


@pytest.mark.parametrize("engine", ENGINES)
def test_results_follow_the_images_of_a_call(engine: str) -> None:
    """A convolution's result is laid out as its image: by channels last in one call, by rows in another."""
    model, x = nn.Conv2d(3, 4, 3, padding=1).eval(), image(2)
    fast = intarsia.compile(model, (x,), engines=[engine])
    with torch.no_grad():
        for given in (x, x.contiguous(), x):
            made, truth = fast(given), model(given)
            assert made.stride() == truth.stride()


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_laying_out_gives_the_layout_and_the_same_numbers(order: list[int], sizes: list[int]) -> None:
    inverse = sorted(range(4), key=order.__getitem__)
    truth = torch.randn([sizes[axis] for axis in order]).permute(inverse)
    found = layout_of(truth)
    rows = truth.clone(memory_format=torch.contiguous_format)
    assert found is not None
    made = laid_out(rows, found)
    assert torch.equal(made, truth)
    wide = [axis for axis in range(4) if truth.shape[axis] > 1]
    assert [made.stride(axis) for axis in wide] == [truth.stride(axis) for axis in wide]


def test_what_is_no_layout_or_view_in_a_file_is_refused() -> None:
    with pytest.raises(ArchiveError, match="the order of axes \\(0, 0\\), which is invalid"):
        layouts_from_json({"orders": [None, [0, 0]], "images": [], "others": []}, 1)
    with pytest.raises(ArchiveError, match="-1 is not the number"):
        layouts_from_json({"orders": [[-1, 0]], "images": [], "others": []}, 1)
    with pytest.raises(ArchiveError, match="results follow input 1, and there are 1"):
        layouts_from_json({"orders": [], "images": [[1, True]], "others": []}, 1)
    with pytest.raises(ArchiveError, match="a view of inputs \\(3,\\) and results \\(\\)"):
        views_from_json([{"graph": None, "reads": [3], "of": []}], 2, lambda graph: graph)
    with pytest.raises(ArchiveError, match="results \\(0,\\), which do not exist"):
        views_from_json([{"graph": None, "reads": [], "of": [0]}], 2, lambda graph: graph)


@pytest.mark.parametrize("engine", [*ENGINES[:3], None])
@pytest.mark.parametrize("compiled_for", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_results_follow_the_layout_of_the_call_as_eagers(
    compiled_for: torch.memory_format, engine: str | None, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    engines = None if engine is None else [engine]
    fast = intarsia.compile(model, (x.to(memory_format=compiled_for),), engines=engines, min_block_size=1)
    intarsia.save(fast, tmp_path / "model.intarsia")
    for module in (fast, intarsia.load(tmp_path / "model.intarsia")):
        for layout in (torch.contiguous_format, torch.channels_last):
            given = x.to(memory_format=layout)
            assert module(given).stride() == model(given).stride()
            torch.testing.assert_close(module(given), model(given), atol=1e-5, rtol=1e-4)


class Slice(nn.Module):
    """A convolution of a slice: on x86 PyTorch returns rows; the rules for fake tensors say channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, x], 1)[:, :4]
        return self.head(torch.relu(self.conv(both)))


class Tokens(Slice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 1).reshape(1, 4, 8, 8))


@pytest.mark.parametrize("engine", ENGINES[:3])
@torch.no_grad()
def test_layouts_are_those_of_the_models_answer(engine: str) -> None:
    tokens, images = torch.randn(1, 64, 4), torch.randn(1, 4, 8, 8)
    last = images.to(memory_format=torch.channels_last)
    for model, example, calls in ((Tokens(), tokens, [tokens]), (Slice(), images, [images, last])):
        fast = intarsia.compile(model.eval(), (example,), engines=[engine], min_block_size=1)
        for x in calls:
            assert fast(x).stride() == model(x).stride()

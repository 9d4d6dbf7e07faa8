"""Images in channels_last: where nobody can tell but by the time it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engines.rewritten import applied, lowered
from torch import nn

import intarsia
from intarsia.engines import PyTorch
from intarsia.engines.graph_rewrites import apply_rewrites


class Picture(nn.Module):
    """Results: an image, what `view` was called on, and a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.image(x)
        return y, y.flatten(2) * 2, y.view(2, -1), x[:, 1:]

    def image(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def test_images_are_laid_out_channels_last_and_results_as_before() -> None:
    model, x = Picture().eval(), torch.randn(2, 3, 6, 7)
    count, module = applied(model, x, "channels_last")
    assert count == 2
    for name, value in module.named_buffers():
        assert value.dim() != 4 or value.is_contiguous(memory_format=torch.channels_last), name
    with torch.no_grad():
        for answer, truth in zip(module(x), model(x), strict=True):
            assert answer.stride() == truth.stride()
        assert module(x)[-1].data_ptr() == x[:, 1:].data_ptr()


class Seen(Picture):
    """A picture of which more than its numbers is seen."""

    def __init__(self, see: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.see = see

    def forward(self, x: torch.Tensor) -> Any:
        return self.see(self.image(x))


@pytest.mark.parametrize(
    "see",
    [
        lambda y: nn.functional.dropout(y, 0.5, True),  # draws in the order of memory
        lambda y: torch.view_as_complex(y.reshape(2, 8, -1, 2)),
        lambda y: y.chunk(2, 1),
        lambda y: y.permute(0, 2, 3, 1),
    ],
    ids=["random", "complex", "parts", "turned"],
)
def test_a_layout_that_would_be_seen_stays(see: Callable[[torch.Tensor], Any]) -> None:
    module = lowered(Seen(see), torch.randn(2, 3, 6, 7))
    assert apply_rewrites(module, ["channels_last"]) == {"channels_last": 0}


@pytest.mark.parametrize(
    "x",
    [torch.randn(3, 6, 7), torch.randn(2, 3, 6, 7).to(memory_format=torch.channels_last)],
    ids=["one image", "laid out so before"],
)
def test_other_images_stay_as_they_come(x: torch.Tensor) -> None:
    assert applied(nn.Conv2d(3, 8, 3), x, "channels_last")[0] == 0


def test_computed_weights_keep_their_layout() -> None:
    class Doubled(Picture):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return nn.functional.conv2d(x, x[:1, :, :3, :3] * 2)

    assert applied(Doubled(), torch.randn(2, 3, 8, 8), "channels_last")[0] == 0


def test_pytorch_is_raced_in_channels_last_where_it_may_win() -> None:
    model, x = Picture().eval(), torch.randn(2, 3, 6, 7)
    measured = intarsia.Measured(budget_s=60)
    fast = intarsia.compile(model, (x,), engines=PyTorch(), partition=measured)
    assert "pytorch, channels_last" in {trial.name for trial in fast.plan.findings.trials}
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)

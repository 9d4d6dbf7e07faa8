"""A path of the model that was not compiled is refused at the door, never answered wrongly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import intarsia
from intarsia.capture.size_guards import check_guards, read_guards
from intarsia.errors import InputError

PLACES = {"x": 0, "y": 1, "z_q_0": 2, "n": 3}
FLAT = [torch.rand(4, 3), torch.rand(5, 2), torch.rand(3, 7), 6]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("L['x'].size()[0] != 1", True),
        ("(L['x'].size()[0] % 2) == 0", True),
        ("1 + 2*L['x'].size()[0] > 9", False),
        ("L['z']['q'][0].size()[1] == 7", True),
        ("2 <= L['y'].size()[0] < 5", False),
        ("not (L['x'].stride()[0] == 3 and L['n'] == 6)", False),
        ("max(L['x'].size()[0], 10) // 3 == 3 or -L['n'] > 0", True),
    ],
)
def test_conditions_are_read_not_executed(text: str, holds: bool) -> None:
    (guard,) = read_guards([text], PLACES)
    assert guard.holds(FLAT) is holds


@pytest.mark.parametrize("text", ["__import__('os').getcwd() == 1", "L['w'].size()[0] == 1", "L['x'] +"])
def test_other_texts_are_left_out_with_a_warning(text: str) -> None:
    with pytest.warns(UserWarning, match="is not checked"):
        assert read_guards([text], PLACES) == ()


def test_the_error_names_the_condition() -> None:
    guards = read_guards(["L['z']['q'][0].size()[1] != 7"], PLACES)
    with pytest.raises(InputError, match=r"does not meet z_q_0\.shape\[1\] != 7"):
        check_guards(guards, FLAT)


class Paths(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return x * 0
        if x.shape[0] == 5:
            return x * 2
        return (x + 1).sin()


def test_a_compiled_model_refuses_sizes_of_another_path() -> None:
    given = intarsia.Input(min_shape=(1, 3), opt_shape=(4, 3), max_shape=(8, 3))
    fast = intarsia.compile(Paths(), (given,), min_block_size=1)
    for rows in (2, 4, 8):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(fast(x), Paths()(x))
    for rows in (1, 5):
        with pytest.raises(InputError, match=rf"x\.shape\[0\] != {rows}"):
            fast(torch.rand(rows, 3))


def test_a_model_of_one_path_takes_size_1() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)).eval()
    given = intarsia.Input(min_shape=(1, 3), opt_shape=(4, 3), max_shape=(8, 3))
    fast = intarsia.compile(model, (given,), min_block_size=1)
    for rows in (1, 4, 8):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


class Vain(nn.Module):
    """Asks for size 1 and does the same either way; asks for 5 and does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return (1 + x).sin()
        if x.shape[0] == 5:
            return x.cos()
        return (x + 1).sin()


def test_a_question_that_makes_no_difference_is_dropped() -> None:
    given = intarsia.Input(min_shape=(1, 3), opt_shape=(4, 3), max_shape=(8, 3))
    fast = intarsia.compile(Vain(), (given,), min_block_size=1)
    for rows in (1, 4):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(fast(x), Vain()(x))
    with pytest.raises(InputError, match=r"x\.shape\[0\] != 5"):
        fast(torch.rand(5, 3))

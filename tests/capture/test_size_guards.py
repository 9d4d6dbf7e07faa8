"""A path of the model that was not compiled is refused at the door, never answered wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.capture.size_guards import check_guards, guard_texts, read_guards
from intarsia.errors import CaptureError, InputError

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
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(CaptureError, match="cannot be read"):
        read_guards([text], PLACES)


class Asks(nn.Module):
    def __init__(self, question: Callable[[int], bool]) -> None:
        super().__init__()
        self.question = question

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + 1 if self.question(input.shape[0]) else input - 1


QUESTIONS: dict[str, Callable[[int], bool]] = {
    "half": lambda n: int(n * 0.5) == 1,
    "bits": lambda n: n & 1 == 0,
    "power": lambda n: 2**n == 8,
    "distance": lambda n: abs(n - 3) == 0,
    "ceil": lambda n: math.ceil(n / 2) == 2,
    "floor": lambda n: math.floor(n / 2) == 2,
    "round": lambda n: round(n / 2) == 2,
    "shift": lambda n: n >> 1 == 1,
    "or": lambda n: n | 1 == 3,
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
@pytest.mark.parametrize("rows", [3, 4])
def test_no_condition_is_dropped(question: Callable[[int], bool], rows: int) -> None:
    model = Asks(question)
    fast = intarsia.compile(model, (torch.rand(rows, 2),), dynamic_shapes={"input": {0: Dim.DYNAMIC}})
    for size in range(2, 9):
        x = torch.rand(size, 2)
        if question(size) == question(rows):
            try:
                torch.testing.assert_close(fast(x), model(x))
            except InputError:  # ceil(n / 2) == 2 may be noted as what the example made of it
                assert size != rows
        else:
            with pytest.raises(InputError):
                fast(x)


def test_a_condition_that_cannot_be_read_fixes_its_sizes() -> None:
    program = torch.export.export(
        Asks(lambda n: n & 1 == 0), (torch.rand(4, 2),), dynamic_shapes=({0: Dim.AUTO},)
    )
    program._guards_code = ["wild(L['input'].size()[0]) == 3"]
    texts, notes = guard_texts(program)
    assert texts == ("L['input_1'].size()[0] == 4",) or texts == ("L['input'].size()[0] == 4",)
    assert "sizes are fixed" in notes[0] and "shape[0] == 4" in notes[0]
    program._guards_code = ["wild() == 3"]
    with pytest.raises(CaptureError, match="cannot be checked"):
        guard_texts(program)


def test_a_torch_that_does_not_tell_its_conditions_is_refused() -> None:
    model, x = Asks(lambda n: n & 1 == 0), torch.rand(4, 2)
    fixed, varying = (torch.export.export(model, (x,), dynamic_shapes=s) for s in (None, ({0: Dim.AUTO},)))
    assert isinstance(varying._guards_code, list), "the private name this package reads"
    for program in (fixed, varying):
        del program._guards_code
    assert guard_texts(fixed) == ((), ())
    with pytest.raises(CaptureError, match="does not tell which conditions"):
        guard_texts(varying)


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

"""Sorting: infinity, NaN and the largest number in their places, equal elements by place where asked."""

from __future__ import annotations

import math

import pytest
import torch
from tests.convert import drivers
from tests.convert.equal import assert_equal, kinds
from tests.convert.one_node import answers_of_both, network_of
from tests.convert.programs import lowered_program, program_of
from torch.export import Dim

from intarsia.convert import convert
from intarsia.errors import GuardError

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
LARGEST = torch.finfo(torch.float32).max
EXTREMES = torch.tensor([math.inf, -math.inf, math.nan, LARGEST, -LARGEST, 0.0, -0.0, 1.0, 2.0])


def _drawn(*sizes: int) -> torch.Tensor:
    return EXTREMES[torch.randint(0, len(EXTREMES), sizes, generator=G)]


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("count", [7, 40, 200])
def test_extremes_in_their_places(count: int, largest: bool, engine: str) -> None:
    x = _drawn(20, count)
    for k in (1, 3, count):
        have, want = answers_of_both(aten.topk.default, x, k, -1, largest, engine=engine)
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("count", [1, 9, 40, 700])
def test_stable(count: int, descending: bool) -> None:
    def ordered(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sort(x, dim=0, descending=descending, stable=True)

    assert_equal(ordered, (torch.randint(0, 4, (count, 3), generator=G),))
    assert_equal(ordered, (torch.randint(0, 4, (count, 3), generator=G).bool(),))
    assert_equal(ordered, (_drawn(count, 3),), left=("openvino",))


def test_stable_at_any_size() -> None:
    calls = [(_drawn(2, n),) for n in (40, 1, 65)]
    assert_equal(
        lambda x: torch.sort(x, dim=-1, stable=True)[1],
        *calls,
        dynamic=({1: Dim("n", max=128)},),
        engines=("onnxruntime",),
    )


def test_scores_are_ranked_by_one_layer() -> None:
    net = assert_equal(lambda x: torch.topk(x.softmax(-1), 2)[0], (torch.randn(3, 8, generator=G),))
    assert kinds(net).count("TopK") == 1
    assert kinds(network_of(aten.topk.default, torch.arange(5), 2)) == ["TopK"]


PLACES = {
    "topk": lambda x: torch.topk(x, 3, 1)[1],
    "topk, smallest": lambda x: torch.topk(x, 3, 1, largest=False)[1],
    "sort": lambda x: torch.sort(x, 1)[1],
    "sort down": lambda x: torch.sort(x, 1, descending=True)[1],
    "argsort": lambda x: torch.argsort(x, 1),
    "kthvalue": lambda x: torch.kthvalue(x, 3, 1)[1],
    "median": lambda x: torch.median(x, 1)[1],
    "nanmedian": lambda x: torch.nanmedian(x, 1)[1],
}


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("name", PLACES)
def test_which_of_equal_elements_is_for_torch_to_say(name: str, engine: str) -> None:
    """Equal ones are in no order that torch promises: such calls it answers itself, all others the engine."""
    function = PLACES[name]
    distinct = torch.stack([torch.randperm(40, generator=G) for _ in range(4)]).float()
    program = drivers.build(engine, convert(lowered_program(function, distinct, dynamic=({},))))
    assert torch.equal(program(distinct)[0], function(distinct))
    with pytest.raises(GuardError):
        program(torch.randint(0, 3, (4, 40), generator=G).float())
    beyond = distinct.sort(1)[0]
    beyond[:, 20:22] = beyond[:, 20:21]  # ties where nobody looks
    if name in ("topk", "topk, smallest", "kthvalue"):
        assert torch.equal(program(beyond)[0], function(beyond))


@pytest.mark.parametrize("k", [2, 3, 5])
def test_a_tie_at_the_border_is_seen(k: int) -> None:
    x = torch.tensor([[5.0, 4.0, 3.0, 3.0, 1.0]])
    program = drivers.build("onnxruntime", convert(program_of(lambda x: torch.topk(x, k)[1], x)))
    if k == 2:
        assert torch.equal(program(x)[0], torch.topk(x, k)[1])
    else:
        with pytest.raises(GuardError):
            program(x)

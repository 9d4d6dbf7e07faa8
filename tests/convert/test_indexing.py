"""Index lists of every kind against eager: masks, None, negative numbers, broadcasting, duplicates, NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as TF
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.convert import drivers
from tests.convert.drivers import ENGINES, build
from tests.convert.programs import (
    answers_of_both,
    assert_equal,
    kinds,
    lowered_program,
    network_of,
    program_of,
)
from tests.processors import skip_unless_rounded
from torch import Tensor
from torch.export import Dim

from intarsia.convert import convert
from intarsia.convert.interpreter import NodeError
from intarsia.errors import GuardError

aten = torch.ops.aten
BROKEN = torch.tensor([1.0, float("nan")])


def answers(engine: str, function: Any, *inputs: Tensor) -> Tensor:
    """The function on an engine; the first result."""
    return build(engine, convert(program_of(function, *inputs)))(*inputs)[0]


@st.composite
def index_lists(draw: Any, shape: tuple[int, ...] = (3, 4, 2, 5)) -> list[Tensor | None]:
    """None, integers (also negative) that broadcast, and a mask over one or two dimensions."""
    found: list[Tensor | None] = []
    axis = 0
    # torch cannot trace a mask next to numbers: how many it picks must agree with theirs.
    kinds = draw(st.sampled_from([["none", "mask"], ["none", "numbers", "column", "stop"]]))
    while axis < len(shape):
        kind = draw(st.sampled_from(kinds))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
        if kind == "stop":
            break
        if kind == "none":
            found.append(None)
        elif kind == "mask":
            if any(i is not None for i in found):
                break
            span = min(draw(st.integers(1, 2)), len(shape) - axis)
            mask = torch.zeros(shape[axis : axis + span], dtype=torch.bool)
            mask.view(-1)[torch.randperm(mask.numel(), generator=generator)[:2]] = True
            found.append(mask)
            axis += span - 1
        else:
            size = (2,) if kind != "column" else (3, 1)
            found.append(torch.randint(-shape[axis], shape[axis], size, generator=generator))
        axis += 1
    return found if any(i is not None for i in found) else [torch.tensor([1, -1])]


@settings(deadline=None, max_examples=30)
@given(indices=index_lists(), frozen=st.booleans())
def test_index(indices: list[Tensor | None], frozen: bool) -> None:
    x = torch.arange(120.0).reshape(3, 4, 2, 5)
    given_ = [i for i in indices if i is not None]

    def function(x: Tensor, *tensors: Tensor) -> Tensor:
        items = iter(tensors or given_)
        return aten.index.Tensor(x, [None if i is None else next(items) for i in indices])

    inputs = (x,) if frozen else (x, *given_)
    assert torch.equal(answers("onnxruntime", function, *inputs), function(*inputs))


@settings(deadline=None, max_examples=30)
@given(indices=index_lists(), accumulate=st.booleans(), scalar=st.booleans())
def test_index_put(indices: list[Tensor | None], accumulate: bool, scalar: bool) -> None:
    x = torch.arange(120.0).reshape(3, 4, 2, 5)
    shape = aten.index.Tensor(x, indices).shape
    # Without accumulation a place named twice may get either value, so all are the same.
    values = (
        torch.tensor(7.0) if scalar or not accumulate else torch.arange(float(shape.numel())).reshape(shape)
    )
    given_ = [i for i in indices if i is not None]

    def function(x: Tensor, values: Tensor, *tensors: Tensor) -> Tensor:
        items = iter(tensors)
        return aten.index_put(x, [None if i is None else next(items) for i in indices], values, accumulate)

    inputs = (x, values, *given_)
    assert torch.equal(answers("onnxruntime", function, *inputs), function(*inputs))


@pytest.mark.parametrize("engine", ENGINES)
def test_values_by_mask(engine: str) -> None:
    x, mask, values = torch.randn(4, 3), torch.tensor([True, False, True, True]), torch.randn(3, 3)
    have = answers(engine, lambda x, m, v: x.index_put((m,), v), x, mask, values)
    assert torch.equal(have, x.index_put((mask,), values))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool])
def test_duplicates_add_up(engine: str, dtype: torch.dtype) -> None:
    skip_unless_rounded(engine, dtype)
    x = torch.zeros(5, 2000).to(dtype)
    index, values = torch.arange(400) % 5, torch.ones(400, 2000).to(dtype)
    have = answers(engine, lambda x, i, v: x.index_put((i,), v, accumulate=True), x, index, values)
    assert torch.equal(have, x.index_put((index,), values, accumulate=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_nan_wins(engine: str, reduce: str, include_self: bool) -> None:
    nan = float("nan")
    x, index = torch.tensor([1.0, nan, 3.0, 4.0]), torch.tensor([0, 0, 1, 3, 3])
    source = torch.tensor([nan, 5.0, 2.0, 9.0, nan])

    def function(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return x.scatter_reduce(0, i, s, reduce, include_self=include_self)

    have = answers(engine, function, x, index, source)
    torch.testing.assert_close(have, function(x, index, source), equal_nan=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_integer_mean_goes_down(engine: str) -> None:
    x, index, source = torch.tensor([-3, 5]), torch.tensor([0, 1, 0]), torch.tensor([-2, -6, 0])

    def function(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return x.scatter_reduce(0, i, s, "mean")

    assert torch.equal(answers(engine, function, x, index, source), function(x, index, source))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_grows_and_cuts(engine: str, mode: str) -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)

    def function(x: Tensor) -> Tensor:
        return TF.pad(x, (-1, 3, 2, -1), mode=mode)

    assert torch.equal(answers(engine, function, x), function(x))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("right", [False, True])
def test_nan_comes_last(engine: str, right: bool) -> None:
    line = torch.tensor([1.0, 2.0, 2.0, 5.0])
    values = torch.tensor([[0.0, 2.0], [3.0, float("nan")]])

    def function(line: Tensor, values: Tensor) -> Tensor:
        return torch.searchsorted(line, values, right=right)

    assert torch.equal(answers(engine, function, line, values), function(line, values))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_open_length(engine: str, mode: str) -> None:
    table = torch.randn(6, 3)
    n, b = Dim("n", min=2, max=64), Dim("b", min=2, max=16)

    def function(table: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
        return TF.embedding_bag(index, table, offsets, mode=mode, padding_idx=1)

    first = (table, torch.tensor([0, 1, 5, 1]), torch.tensor([0, 1, 2]))
    program = build(engine, convert(program_of(function, *first, dynamic=({}, {0: n}, {0: b}))))
    for index, offsets in ((first[1:]), ([3, 2, 1, 4, 4, 0], [0, 2, 2, 5]), ([1, 2], [0, 1])):
        inputs = (table, torch.as_tensor(index), torch.as_tensor(offsets))
        torch.testing.assert_close(program(*inputs)[0], function(*inputs))


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda x: aten.as_strided(x[1:], [2], [1]), (torch.randn(4),), "as_strided of a view at offset 1"),
        (
            lambda x: torch.bucketize(x, BROKEN),
            (torch.randn(3),),
            "boundaries that are not sorted, or hold NaN, are not handled",
        ),
        (
            lambda x, i, s: x.index_reduce(0, i, s, "mean"),
            (torch.randn(3).half(), torch.tensor([0, 1]), torch.randn(2).half()),
            "reduce='mean' in FLOAT16, which torch rounds at each step, is not handled",
        ),
    ],
)
def test_refused_with_a_reason(function: Any, inputs: tuple[Tensor, ...], reason: str) -> None:
    with pytest.raises(NodeError, match=reason.replace("(", r"\(")):
        convert(program_of(function, *inputs))


@pytest.mark.parametrize("engine", ENGINES)
def test_narrow_by_a_start_in_a_tensor_ends_where_torch_raises(engine: str) -> None:
    x = torch.arange(10.0).view(2, 5)
    program = build(engine, network_of(aten.narrow.Tensor, x, 1, torch.tensor(0), 2))
    for start in (0, 3, -2, -5):
        assert torch.equal(program(x, torch.tensor(start))[0], x.narrow(1, start, 2))
    for start in (4, 5, -1, -6, 2**40):
        with pytest.raises((RuntimeError, IndexError)):
            x.narrow(1, torch.tensor(start), 2)
        with pytest.raises(GuardError):
            program(x, torch.tensor(start))


def test_narrow_to_nothing_by_a_start_in_a_tensor_is_for_torch() -> None:
    x = torch.arange(10.0).view(2, 5)
    with pytest.raises(NodeError, match="has no elements, but torch refuses indices out of range"):
        network_of(aten.narrow.Tensor, x, 1, torch.tensor(0), 0)


# Sorting: infinity, NaN and the largest number in their places, equal elements by place where asked.


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

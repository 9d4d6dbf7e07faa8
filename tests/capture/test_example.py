"""Each input of the example is an input of its own, and the model is as it was after it ran."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import intarsia
from intarsia.capture.example import copied_call, distinct_inputs, fresh_copy
from intarsia.capture.protect import undisturbed
from intarsia.checkpoint.linear import PackedLinear
from intarsia.errors import CaptureError, InputError
from intarsia.pipeline import split


class Difference(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


class OfDict(nn.Module):
    def forward(self, pair: dict[str, torch.Tensor]) -> torch.Tensor:
        return pair["a"] - pair["b"]


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.shift


def test_one_tensor_given_twice_stays_two_inputs() -> None:
    x, y = torch.rand(3), torch.rand(3)
    torch.testing.assert_close(intarsia.compile(Difference(), (x, x))(x, y), x - y)
    torch.testing.assert_close(intarsia.compile(Difference(), (x,), {"y": x})(x, y=y), x - y)
    torch.testing.assert_close(intarsia.compile(OfDict(), ({"a": x, "b": x},))({"a": x, "b": y}), x - y)


def test_self_attention_compiled_with_one_tensor_takes_three() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    q, k, v = torch.rand(3, 2, 5, 8).unbind()
    fast = intarsia.compile(attention, (q, q, q))
    torch.testing.assert_close(fast(q, k, v)[0], attention(q, k, v)[0], rtol=1e-4, atol=1e-5)


def test_an_example_that_is_the_models_own_buffer_is_an_input() -> None:
    model = WithBuffer()
    fast = intarsia.compile(model, (model.shift,))
    x = torch.rand(3)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(4, 3).t(),
        torch.rand(1, 3).expand(5, 3),
        torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.rand(3, requires_grad=True),
    ],
)
def test_a_copy_keeps_values_strides_and_grad(value: torch.Tensor) -> None:
    copy = fresh_copy(value)
    assert torch.equal(copy, value) and copy.stride() == value.stride()
    assert copy.requires_grad == value.requires_grad and copy.data_ptr() != value.data_ptr()


def test_only_what_occurs_twice_is_copied() -> None:
    x, y = torch.rand(2), torch.rand(2)
    (a, b, c), kwargs = distinct_inputs(None, (x, y, x), {"z": y})
    assert a is x and b is y and c is not x and kwargs["z"] is not y


def test_a_copied_call_keeps_what_is_one_tensor() -> None:
    x = torch.rand(2)
    (a, b), _ = copied_call(((x, x), {}))
    assert a is b and a is not x


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3) * random.random() * float(numpy.random.rand())


def test_compiling_moves_no_generator() -> None:
    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(1)), float(numpy.random.rand()), random.random()

    torch.manual_seed(0), numpy.random.seed(0), random.seed(0)
    expected = drawn()
    torch.manual_seed(0), numpy.random.seed(0), random.seed(0)
    intarsia.compile(Draws(), (torch.ones(3),))
    assert drawn() == expected


class Flagged(nn.Module):
    def forward(self, x: torch.Tensor, flag: bool = True, scale: float = 2.0) -> torch.Tensor:
        return x * scale if flag else x


def test_an_argument_that_repeats_its_default_is_taken() -> None:
    x = torch.rand(3)
    fast = intarsia.compile(Flagged(), (x,))
    for answer in (fast(x), fast(x, True), fast(x, flag=True, scale=2.0)):
        torch.testing.assert_close(answer, x * 2)
    with pytest.raises(
        intarsia.errors.InputError, match="argument flag is False; compiled for its default, True"
    ):
        fast(x, flag=False)


def test_an_argument_left_out_is_its_default() -> None:
    x = torch.rand(3)
    torch.testing.assert_close(intarsia.compile(Flagged(), (x, True))(x), x * 2)
    with pytest.raises(intarsia.errors.InputError, match="flag"):
        intarsia.compile(Flagged(), (x, False))(x)


def test_wrong_wishes_are_told_in_a_sentence() -> None:
    x = torch.ones(2, 4)
    program = torch.export.export(nn.ReLU(), (x,))
    with pytest.raises(intarsia.errors.InputError, match="dtype is 'float32'"):
        intarsia.Input(shape=(2, 4), dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(intarsia.errors.InputError, match="an ExportedProgram has its own shapes"):
        intarsia.compile(program, (intarsia.Input(shape=(2, 4)),))  # type: ignore[arg-type]
    with pytest.raises(intarsia.errors.PartitionError, match="min_block_size='3'"):
        intarsia.compile(nn.ReLU(), (x,), min_block_size="3")  # type: ignore[arg-type]
    with pytest.raises(intarsia.errors.InputError, match="args must be a tuple"):
        intarsia.compile(nn.ReLU(), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [intarsia.compile, intarsia.explain, split])
@pytest.mark.parametrize(
    ("wrong", "what"), [(torch.relu, "a builtin_function_or_method"), (nn.ReLU, "the class ReLU")]
)
def test_what_is_no_model_is_told(use: Callable[..., Any], wrong: Any, what: str) -> None:
    with pytest.raises(InputError, match=f"a model must be an nn.Module.* not {what}"):
        use(wrong, (torch.ones(2, 4),))


def test_compiling_in_several_threads_moves_no_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with ThreadPoolExecutor(3) as pool:
        for made in [pool.submit(intarsia.compile, Draws(), (torch.ones(3),)) for _ in range(3)]:
            made.result()
    assert torch.equal(torch.rand(4), expected)


def test_a_nested_tensor_is_copied() -> None:
    nested = torch._nested_tensor_from_mask(
        torch.rand(2, 3, 4), torch.tensor([[True] * 3, [True, True, False]])
    )
    copy = fresh_copy(nested)
    assert copy is not nested and copy.is_nested
    for a, b in zip(copy.unbind(), nested.unbind(), strict=True):
        assert torch.equal(a, b)


# A run of the model for its answer alone leaves no trace, and copies no weights in few bits twice.


class Counts(nn.Module):
    """Writes to a large buffer of integers from the n-th run on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.runs = first, [0]  # a list, which nobody puts back
        self.register_buffer("table", torch.zeros(1024, 1024, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs[0] += 1
        if self.runs[0] >= self.first:
            self.table.add_(1)
        return x + self.table[0, 0]


def test_large_integers_that_no_run_writes_to_are_not_copied() -> None:
    model, x = Counts(first=99), torch.zeros(1)
    for _ in range(2):
        with undisturbed(model) as held:
            model(x)
            assert held(model.table).data_ptr() == model.table.data_ptr()
    model.table.add_(1)  # a write of the user's
    model.first = 1
    with undisturbed(model) as held:
        assert model(x) == 2
        after = held(model.table)
    assert int(model.table.max()) == 1
    assert int(after.min()) == 2


def test_large_integers_that_every_run_writes_to_come_back() -> None:
    model = Counts(first=1)
    for _ in range(3):
        with undisturbed(model) as held:
            model(torch.zeros(1))
            after = held(model.table)
        assert int(model.table.max()) == 0
        assert int(after.min()) == 1


def test_large_integers_that_only_a_later_run_writes_to_are_an_error() -> None:
    model = Counts(first=2)
    with undisturbed(model):
        model(torch.zeros(1))
    with pytest.raises(CaptureError, match="large buffer of integers"), undisturbed(model):
        model(torch.zeros(1))


def test_packed_weights_of_a_checkpoint_are_not_copied_at_all() -> None:
    class Wrong(PackedLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight_packed.add_(1)
            return super().forward(x)

    for kind in (PackedLinear, Wrong):
        layer = kind(nn.Linear(1024, 1024, bias=False), 4, 128, {"weight_packed"}, True, False)
        with pytest.raises(CaptureError) if kind is Wrong else nullcontext(), undisturbed(layer) as held:
            layer(torch.zeros(1, 1024))
            assert held(layer.weight_packed).data_ptr() == layer.weight_packed.data_ptr()

"""Every target the reference library converts is converted here, or says why not; sums in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.convert.reference import CORE_REASONS, REASONS, TARGETS, how, target_of
from tests.convert.samples import BEFORE_TORCH_2_12, OPINFO_MISSING, op_infos
from tests.convert.sums import ADDS_UP, in_any_order
from torch.fx.experimental.proxy_tensor import make_fx

from intarsia.convert.evaluators import EVALUATORS
from intarsia.convert.registry import registry
from intarsia.lower.fourier import COMPLEX_AND_FOURIER


def test_the_list_is_whole() -> None:
    assert len(TARGETS) == 243
    assert set(REASONS) <= set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_target_is_answered(name: str) -> None:
    assert how(name) is not None, f"{name} has no converter, no evaluator and no reason"


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_is_not_kept_for_what_is_converted(name: str) -> None:
    if "tensorrt" in name:
        assert not hasattr(torch.ops.tensorrt, "quantize_op"), "the library is loaded: convert its operators"
        return
    target = target_of(name)
    assert target not in registry and target not in EVALUATORS


def core_operators() -> list[torch._ops.OpOverload]:
    """Core ATen without what is random or writes to its arguments."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in (getattr(packet, o) for o in packet.overloads()):
            random = torch.Tag.nondeterministic_seeded in overload.tags
            if torch.Tag.core in overload.tags and not random and not overload._schema.is_mutable:
                found.append(overload)
    return found


@pytest.mark.parametrize("overload", core_operators(), ids=str)
def test_core_aten_is_converted(overload: torch._ops.OpOverload) -> None:
    reason = CORE_REASONS.get(str(overload))
    spelled_out = overload in COMPLEX_AND_FOURIER and overload not in registry
    assert overload in registry or overload in EVALUATORS or spelled_out or reason is not None


# The judge of sums: another order of adding is right, a term left out is not.


LARGEST = torch.finfo(torch.float32).max
Function = Callable[..., torch.Tensor]


def is_right(function: Function, have: torch.Tensor, *inputs: torch.Tensor) -> bool:
    """Whether an answer in float32 is one that adding in some order gives."""
    wide = [x.double() for x in inputs]
    module = make_fx(lambda *args: [function(*args)])(*wide)
    want = function(*inputs)
    (settled,) = in_any_order(module, wide, [have], [want])
    return torch.equal(settled.nan_to_num(7.0), want.nan_to_num(7.0))


def added_in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    total = torch.zeros(())
    for place in order:
        total = total + x[place]
    return total


@given(st.permutations(range(9)), st.integers(0, 2**20))
def test_every_order_is_right(order: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-30, 60, (9,), generator=generator)
    x = torch.randn(9, generator=generator) * sizes
    assert is_right(torch.sum, added_in_order(x, order), x)


def test_a_term_left_out_is_wrong() -> None:
    x = torch.arange(1.0, 10.0)
    assert is_right(torch.sum, x.sum(), x)
    assert not is_right(torch.sum, x[1:].sum(), x)
    assert not is_right(torch.mean, x.sum() / 8, x)


def test_only_the_sums_that_hold_a_large_number_are_given_room() -> None:
    x = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24), 1.0])
    eager, other = torch.cumsum(x, 0), torch.tensor([1.0, 2.0**24, 2.0**24, 0.0, 1.0])
    assert is_right(lambda y: torch.cumsum(y, 0), other, x) and not torch.equal(eager, other)
    other[0] = 1.0001
    assert not is_right(lambda y: torch.cumsum(y, 0), other, x)


def test_what_may_overflow_in_some_order_may_and_nothing_else() -> None:
    x = torch.tensor([LARGEST, LARGEST, -LARGEST])
    assert is_right(torch.sum, torch.tensor(LARGEST), x)
    assert is_right(torch.sum, torch.tensor(float("inf")), x)
    half = x / 8
    assert not is_right(torch.sum, torch.tensor(float("inf")), half)
    assert not is_right(torch.sum, torch.tensor(float("nan")), half)


def test_products_are_terms() -> None:
    a, b = torch.tensor([[1.0, 2.0**24, 3.0, -(2.0**24)]]), torch.ones(4, 1)
    assert is_right(torch.mm, torch.tensor([[3.0]]), a, b)
    assert not is_right(torch.mm, torch.tensor([[300.0]]), a, b)


@pytest.mark.skipif(bool(OPINFO_MISSING), reason=OPINFO_MISSING)
def test_what_adds_up_is_an_op() -> None:
    unknown = ADDS_UP - {info.name for info in op_infos().values()}
    assert unknown <= ({"native_group_norm"} if BEFORE_TORCH_2_12 else set())  # of newer torch

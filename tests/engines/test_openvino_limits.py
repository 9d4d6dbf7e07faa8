"""OpenVINO is not given what it would answer wrongly; what it is given, it answers rightly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import intarsia
from intarsia.cache.machine import is_arm
from intarsia.engines import OpenVINO
from intarsia.errors import EngineError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

pytestmark = pytest.mark.openvino


def network(body: Callable[..., Tensor], *inputs: torch.Tensor) -> Network:
    net = Network()
    with net_guard(net):
        body(*(Tensor(f"x{i}", x.dtype, tuple(x.shape)) for i, x in enumerate(inputs))).mark_output("y")
    return net


REFUSED = {
    "float64": (lambda x: x + x, (torch.zeros(2, dtype=torch.float64),), "x0 is float64"),
    "float64 inside": (
        lambda x: F.cast(F.cast(x, torch.float64), torch.float32),
        (torch.zeros(2),),
        "is float64",
    ),
    "long constant": (
        lambda x: F.add(x, F.constant(np.array(2**40))),
        (torch.zeros(2, dtype=torch.int64),),
        "a constant of Add holds 1099511627776; OpenVINO is correct from "
        + ("-16777216 to 16777216" if is_arm() else "-2147483648 to 2147483647"),
    ),
    "equal to more than floats hold": (
        lambda x: F.equal(x, F.constant(np.array(2**24 + 1))),
        (torch.zeros(2, dtype=torch.int64),),
        "a constant of Equal holds 16777217; OpenVINO is correct from -16777216 to 16777216",
    ),
    "nobody knows what it makes": (
        lambda x: F.opaque("nobody.knows", "Mystery", x, makes=[(torch.int64, (2,))])[0],
        (torch.zeros(2),),
        "OpenVINO",
    ),
    "a table too long to check": (
        lambda x: F.gather(F.expand(F.constant(1.0), [2**23]), x),
        (torch.zeros(2, dtype=torch.int64),),
        "Gather into 8388608 elements: OpenVINO does not check such indices",
    ),
    "empty look-up": (
        lambda x, i: F.gather(x, i),
        (torch.zeros(3), torch.zeros(0, dtype=torch.int64)),
        r"Gather of the empty tensor x1\[0\] is not safe",
    ),
    "empty product": (
        lambda a, b: F.matmul(a, b),
        (torch.zeros(2, 0), torch.zeros(0, 3)),
        "MatMul of the empty tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name: str) -> None:
    body, inputs, reason = REFUSED[name]
    net = network(body, *inputs)
    with pytest.raises(EngineError, match=reason):
        OpenVINO().build(net)
    assert "OpenVINO" in str(OpenVINO().probe(net))


TAKEN = {
    "join with an empty one": (lambda a, b: F.concat([a, b], 0), (torch.zeros(0, 3), torch.ones(2, 3))),
    "sum of nothing": (lambda a: F.reduce_sum(a, [0], keepdims=False), (torch.zeros(0, 3),)),
    "empty and empty": (lambda a: F.relu(a) + 1.0, (torch.zeros(0, 3),)),
    "any of several": (
        lambda a: F.reduce_max(F.cast(F.greater(a, 0.0), torch.int32), [0], keepdims=False),
        (torch.tensor([-1.0, 2.0]),),
    ),
    "largest integer": (
        lambda a: F.reduce_max(a, [0], keepdims=False),
        (torch.tensor([3, -(2**24), 2**24], dtype=torch.int32) // 4,),
    ),
    "a remainder of floats": (
        lambda a: F.mod(a, 0.1, fmod=True),
        (torch.tensor([1.0, -7.3, 1e5, 0.2]),),
    ),
    "to the end": (lambda a: F.slice(a, 1, 2**62, axis=0), (torch.arange(4.0),)),
    "an input nobody reads": (lambda a, b: F.relu(b), (torch.ones(3), torch.ones(2))),
}
EXPECTED = {
    "join with an empty one": torch.ones(2, 3),
    "sum of nothing": torch.zeros(3),
    "empty and empty": torch.zeros(0, 3),
    "any of several": torch.tensor(1, dtype=torch.int32),
    "largest integer": torch.tensor(2**22, dtype=torch.int32),
    "a remainder of floats": torch.tensor([1.0, -7.3, 1e5, 0.2]).fmod(0.1),
    "to the end": torch.tensor([1.0, 2.0, 3.0]),
    "an input nobody reads": torch.ones(2),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken_and_right(name: str) -> None:
    body, inputs = TAKEN[name]
    (result,) = OpenVINO(threads=1).build(network(body, *inputs))(*inputs)
    torch.testing.assert_close(result, EXPECTED[name])


class Rounded(torch.nn.Module):
    def __init__(self, rounding) -> None:
        super().__init__()
        self.rounding = rounding

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.rounding(x / y)


@pytest.mark.parametrize(
    "rounding",
    [torch.floor, torch.ceil, lambda q: torch.round(q / 2), lambda q: (q + 1).clamp(0, 99).long()],
    ids=["floor", "ceil", "round", "cast"],
)
def test_quotients_that_are_rounded_later_are_exact(rounding) -> None:
    """41 / 41 by the reciprocal of 41 is less than 1, and its floor was 0."""
    model, example = Rounded(rounding), (torch.rand(64, 64) + 1, torch.rand(64, 64) + 1)
    fast = intarsia.compile(model, example, engines=["openvino"], min_block_size=1)
    numbers = torch.arange(1.0, 4097.0).reshape(64, 64)
    divisors = torch.arange(1.0, 65.0).expand(64, 64).contiguous()
    assert torch.equal(fast(numbers, divisors), model(numbers, divisors))
    assert "openvino does not divide exactly" in str(fast.plan)


def test_quotients_that_stay_floats_are_openvinos() -> None:
    model, example = Rounded(torch.tanh), (torch.rand(64, 64) + 1, torch.rand(64, 64) + 1)
    fast = intarsia.compile(model, example, engines=["openvino"], min_block_size=1)
    assert fast.plan.engines == ("openvino",)

"""Inductor as an engine: answers as PyTorch, refusals in words, nothing imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import Inductor, default_engines, known_engines
from intarsia.errors import EngineError

pytestmark = pytest.mark.skipif(
    Inductor().unavailable() is not None, reason=f"Inductor is not usable here: {Inductor().unavailable()}"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.first(x))
        drawn = torch.rand_like(y)  # PyTorch draws; what comes before and after is Inductor's
        return torch.sigmoid(self.second(y)), drawn


def test_it_answers_as_pytorch_and_leaves_random_numbers_to_it() -> None:
    model, x = Net().eval(), torch.randn(2, 8)
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert "inductor" in fast.plan.engines and "pytorch" in fast.plan.engines
    assert "it draws random numbers" in str(fast.plan)
    other = torch.randn(8, 2).t()  # Inductor's code presumes the strides of the example
    for given in (x, other):
        torch.manual_seed(0)
        answer, drawn = fast(given)
        torch.manual_seed(0)
        expected, truth = model(given)
        torch.testing.assert_close(answer, expected)
        assert torch.equal(drawn, truth)


def test_sizes_that_vary_are_refused_in_words() -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    fast = intarsia.compile(
        nn.Linear(4, 4),
        (torch.randn(3, 4),),
        dynamic_shapes=({0: batch},),
        engines=["inductor"],
        min_block_size=1,
    )
    assert fast.plan.engines == ("pytorch",)
    assert "vary" in str(fast.plan)


def test_what_fails_to_compile_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no room\nsecond line")

    monkeypatch.setattr("intarsia.engines.inductor.engine.compile_graph", fail)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert "Inductor failed to compile: RuntimeError: no room" in str(fast.plan)
    torch.testing.assert_close(fast(x), model(x))


def test_an_option_that_does_not_exist_is_an_error_with_near_names() -> None:
    with pytest.raises(EngineError, match=r"no option 'max_autotun'; near are .*max_autotune"):
        intarsia.compile(
            nn.Linear(2, 2), (torch.ones(1, 2),), engines=[Inductor(options={"max_autotun": True})]
        )


def test_torch_has_what_is_used_of_it() -> None:
    """The private names this engine relies on; should torch rename one, this says so."""
    import torch._inductor

    assert callable(torch._inductor.compile)
    assert {"freezing", "max_autotune", "realize_reads_threshold"} <= set(torch._inductor.list_options())


@pytest.mark.parametrize(
    ("asked", "dtype", "frozen"),
    [
        (Inductor(), torch.bfloat16, False),  # frozen, they would be kept in float32
        (Inductor(freezing=True), torch.bfloat16, True),
        (Inductor(), torch.float32, True),
        (Inductor(freezing=False), torch.float32, False),
    ],
)
def test_weights_are_frozen_unless_one_row_reads_them(
    asked: Inductor, dtype: torch.dtype, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []

    def compile_graph(module: object, example: object, config: dict[str, object]) -> None:
        given.append(config)
        raise RuntimeError("seen")

    monkeypatch.setattr("intarsia.engines.inductor.engine.compile_graph", compile_graph)
    model, x = nn.Linear(128, 128).to(dtype), torch.randn(1, 128, dtype=dtype)
    intarsia.compile(model, (x,), engines=[asked], min_block_size=1)
    config = given[0]
    assert config["freezing"] is frozen
    assert ("realize_reads_threshold" in config) == (dtype == torch.bfloat16)


def test_one_row_in_bfloat16_answers_as_pytorch() -> None:
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.SiLU(), nn.Linear(256, 128)).bfloat16()
    x = torch.randn(1, 128).bfloat16()
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert fast.plan.engines == ("inductor",)
    torch.testing.assert_close(fast(x), model(x), rtol=2**-6, atol=2**-8)
    other = x * float("inf")
    torch.testing.assert_close(fast(other), model(other), equal_nan=True)


def test_known_by_name_and_not_asked_by_default() -> None:
    assert "inductor" in known_engines()
    assert "inductor" not in [engine.name for engine in default_engines()]
    assert [engine.name for engine in default_engines("cuda")] == ["inductor", "pytorch"]


def test_nothing_of_it_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import intarsia, intarsia.engines;"
        "more = set(sys.modules) - before;"
        "print([name for name in more if name.startswith(('torch._inductor', 'triton'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"

"""Inductor as an engine: answers as PyTorch, refusals in words, nothing imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import Inductor, default_engines, known_engines
from intarsia.errors import EngineError, InputError

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


class Attending(nn.Module):
    """Sizes that vary are read off tensors, multiplied, and shared by two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.second(torch.relu(self.first(x)))
        heads = y.view(1, x.shape[1], 2, 8).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return seen.transpose(1, 2).reshape(x.shape), torch.arange(x.shape[1])


class Quotients(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x) * 2, torch.remainder(x, 1.5), x // 1.5, torch.remainder(x, x.flip(0))


def test_remainders_and_floored_quotients_of_floats_are_left_to_pytorch() -> None:
    """Inductor's are wrong for large numbers: the remainder of 1e10 and 1.5 is 1, and Inductor gives 0."""
    model, x = Quotients(), torch.linspace(-5, 5, 8)
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert "inductor" in fast.plan.engines
    large = torch.tensor([1e10, -1e7, 12345.678, torch.inf, -torch.inf, torch.nan, 0.5, -0.0])
    for made, truth in zip(fast(large), model(large), strict=True):
        torch.testing.assert_close(made, truth, equal_nan=True)


def test_sizes_may_vary() -> None:
    model, length = Attending().eval(), torch.export.Dim("length", min=2, max=24)

    def call(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1, size, 16), torch.randn(1, 1, size, size)

    shapes = ({1: length}, {2: length, 3: length})
    fast = intarsia.compile(model, call(9), dynamic_shapes=shapes, engines=["inductor"], min_block_size=1)
    assert fast.plan.engines == ("inductor",), fast.plan
    for size in (2, 3, 8, 9, 16, 24):  # 16 is the width, too
        x, mask = call(size)
        torch.testing.assert_close(fast(x, mask), model(x, mask))
        turned = mask.transpose(2, 3)  # laid out otherwise
        torch.testing.assert_close(fast(x, turned), model(x, turned))
    with pytest.raises(InputError):
        fast(*call(25))


def test_a_size_that_may_be_one_is_refused_in_words() -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    fast = intarsia.compile(model, (x,), dynamic_shapes=({0: batch},), engines=["inductor"], min_block_size=1)
    assert fast.plan.engines == ("pytorch",)
    assert "sizes below 2 need separate code" in str(fast.plan)
    torch.testing.assert_close(fast(x[:1]), model(x[:1]))


class Picking(nn.Module):
    """A size in the middle is known only once the values are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.first(x))
        picked = torch.sigmoid(self.second(y))[torch.nonzero(y[:, 0] > 0.1)[:, 0]]
        return torch.tanh(picked) + picked.sum(), torch.exp(y) * x.shape[0]


def test_sizes_that_depend_on_values_are_left_to_pytorch() -> None:
    model, batch = Picking().eval(), torch.export.Dim("batch", min=2, max=16)
    shapes = ({0: batch},)
    x = torch.randn(6, 8)
    fast = intarsia.compile(model, (x,), dynamic_shapes=shapes, engines=["inductor"], min_block_size=1)
    assert set(fast.plan.engines) == {"inductor", "pytorch"}
    assert "depends on values" in str(fast.plan)
    for size in (2, 8, 16):
        x = torch.randn(size, 8)
        torch.testing.assert_close(fast(x), model(x))


def test_code_for_some_sizes_only_is_refused() -> None:
    from intarsia.engines.inductor.varying import VaryingInputs

    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(nn.ReLU(), (torch.ones(3, 4),), dynamic_shapes=({0: batch},))
    described = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = VaryingInputs(described)
    inputs.check()
    assert inputs.tensors[0].shape[0] > 1  # known of all sizes
    inputs.check()
    assert inputs.tensors[0].shape[0] < 5
    with pytest.raises(EngineError, match=r"its code would hold only where .* < 5"):
        inputs.check()
    assert not described[0].shape[0].node.shape_env.guards  # the graph's own sizes are as they were


def test_a_graph_that_asks_for_such_code_runs_in_pytorch() -> None:
    class Less(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x[1:]) + x[:1]  # broadcast where there are two rows

    model, batch = Less(), torch.export.Dim("batch", min=2, max=9)
    fast = intarsia.compile(
        model, (torch.randn(5, 4),), dynamic_shapes=({0: batch},), engines=["inductor"], min_block_size=1
    )
    assert "its code would hold only where" in str(fast.plan)
    for size in (2, 3, 9):
        x = torch.randn(size, 4)
        torch.testing.assert_close(fast(x), model(x))


def test_sizes_in_proportion_are_never_wrong() -> None:
    class Paired(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.exp(x[:, None] + y.view(x.shape[0], 2))

    half = torch.export.Dim("half", min=2, max=8)
    shapes = ({0: half}, {0: 2 * half})
    given = torch.randn(3), torch.randn(6)
    fast = intarsia.compile(Paired(), given, dynamic_shapes=shapes, engines=["inductor"], min_block_size=1)
    for size in (2, 5, 8):
        x, y = torch.randn(size), torch.randn(2 * size)
        torch.testing.assert_close(fast(x, y), Paired()(x, y))


def test_what_fails_to_compile_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no room\nsecond line")

    monkeypatch.setattr("intarsia.engines.inductor.engine.compile_graph", fail)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert "Inductor failed to compile: RuntimeError: no room" in str(fast.plan)
    torch.testing.assert_close(fast(x), model(x))


def test_an_option_that_does_not_exist_is_an_error_with_near_names() -> None:
    with pytest.raises(EngineError, match=r"no option 'max_autotun'; did you mean .*max_autotune"):
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

"""The model is the judge: what is compiled is compared with the model run eagerly."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import intarsia
from intarsia.build.judge import Judge
from intarsia.build.trial import Case, Cases
from intarsia.capture.example import Call
from intarsia.engines import GraphEngine, Program
from intarsia.errors import PartitionError
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.piece import extract
from intarsia.graph.plan import Plan, Segment
from intarsia.lower import Lowered, size_examples
from intarsia.lower.decompositions import register_decomposition, unregister_decomposition
from intarsia.lower.model import lower_model


@pytest.fixture
def wrong_decomposition() -> Iterator[Any]:
    """A decomposition that ignores an argument: of an operator that no engine converts."""
    operator = torch.ops.aten.logaddexp2.default

    @register_decomposition(operator)
    def logaddexp2(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self * 1.0

    yield operator
    unregister_decomposition(operator)


def test_a_piece_that_is_the_whole_graph_takes_its_answers_in_the_order_of_the_piece() -> None:
    class Reversed(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            early = torch.tanh(x)
            return early.exp() + 1, early

    x = torch.randn(3, 4)
    lowered, _ = lower_model(Reversed(), (x,), {}, None, has_converter=bool, drop_guards=True)
    graph = lowered.module.graph
    (piece,) = extract(lowered.module, Plan((Segment("pytorch", tuple(compute_nodes(graph))),)))
    whole = Case(lowered.module, [x], tuple(Reversed()(x)))
    (source,) = (node for node in graph.nodes if node.op == "placeholder")
    case = Cases(lowered.module, [whole]).of(piece, 0, {source: x})
    assert case.expected[0] is whole.expected[1] and case.expected[1] is whole.expected[0]
    for place in (0, 1):
        torch.testing.assert_close(case.expected[place], piece.module(x)[place])
        own, of_whole = case.rounding(0.0).change(place, 1), whole.rounding(0.0).change(1 - place, 1)
        assert own is not None and of_whole is not None and torch.equal(own, of_whole)


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logaddexp2(torch.tanh(x), x + 1) * 2


def test_a_wrong_decomposition_is_found_named_and_left_out(wrong_decomposition: Any) -> None:
    x = torch.randn(3, 4)
    fast = intarsia.compile(Sums(), (x,), min_block_size=1)
    torch.testing.assert_close(fast(x), Sums()(x))
    (note,) = [note for note in fast.notes if "logaddexp2" in note]
    assert "the decomposition of aten.logaddexp2.default is not used" in note and "off by" in note
    assert fast.plan.on_engines > 0, "what is right stays on engines"


def test_the_zero_rows_of_the_transformer_fast_path() -> None:
    """In evaluation nn.TransformerEncoder gives zeros where keys are padding; the exported graph does not."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 3:] = True
    fast = intarsia.compile(model, (x,), {"src_key_padding_mask": padding})
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(fast(x, src_key_padding_mask=padding), expected)


class Hooked(nn.Module):
    """Another answer than its graph: a change of Python state that capture cannot see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if torch.compiler.is_compiling() else torch.relu(x) * 2


def test_a_graph_unlike_its_model_is_never_returned() -> None:
    x = torch.randn(3, 4)
    fast = intarsia.compile(Hooked(), (x,))
    torch.testing.assert_close(fast(x), Hooked()(x))
    assert any("the model runs as it is" in note and "differs from the model" in note for note in fast.notes)
    assert fast.plan.engines == ("pytorch",)
    assert "runs as it is" in str(fast.plan)
    with pytest.raises(PartitionError, match="the compiled model differs from the model: output 0 is off"):
        intarsia.compile(Hooked(), (x,), require_full_compilation=True)


class Dice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + torch.rand_like(x)


class Lots(nn.Module):
    """Random in a way that no random state of torch's explains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        return torch.relu(x) * (time.perf_counter_ns() % 1009)


def test_a_model_that_reads_a_clock_runs_as_it_is_and_says_so() -> None:
    fast = intarsia.compile(Lots(), (torch.randn(3, 4),))
    assert any("two runs of the model with the same random numbers differ" in note for note in fast.notes)
    assert fast.plan.engines == ("pytorch",)


def test_a_model_that_draws_from_torch_is_compared_from_one_random_state() -> None:
    x = torch.randn(3, 4)
    fast = intarsia.compile(Dice(), (x,), min_block_size=1)
    assert not fast.notes
    torch.manual_seed(1)
    expected = Dice()(x)
    torch.manual_seed(1)
    torch.testing.assert_close(fast(x), expected)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.drop = nn.Dropout()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        x.add_(1)
        return self.drop(x) * self.count


def test_judging_leaves_model_inputs_and_random_state_alone() -> None:
    model, x = Stateful().train(), torch.randn(3)
    before, state = x.clone(), torch.get_rng_state()
    intarsia.compile(model, (x,))
    assert int(model.count) == 0
    assert model.training and model.drop.training
    torch.testing.assert_close(x, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_model_writes_is_compared_too() -> None:
    model, x = Stateful().eval(), torch.randn(3)
    fast = intarsia.compile(model, (x,))
    twin = Stateful().eval()
    for _ in range(3):
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(fast(mine), twin(theirs))
        torch.testing.assert_close(mine, theirs)
    assert int(model.count) == 3


def test_an_exported_program_is_judged_by_itself() -> None:
    x = torch.randn(3, 4)
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (x,))
    fast = intarsia.compile(program, (x,))
    torch.testing.assert_close(fast(x), program.module()(x).detach())


class Largest(nn.Module):
    """Right at the example, wrong at the largest size when captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and x.shape[0] > 6:
            return torch.relu(x) * 2
        return torch.relu(x)


def test_the_ends_of_a_range_are_judged() -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    fast = intarsia.compile(Largest(), (torch.randn(3, 4),), dynamic_shapes={"x": {0: batch}})
    x = torch.randn(8, 4)
    torch.testing.assert_close(fast(x), Largest()(x))


def test_the_graph_is_not_run_at_sizes_where_the_compiled_module_answers_as_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph_answer, rows = Judge.graph_answer, []

    def counted(self: Judge, lowered: Lowered, call: Call) -> tuple[Any, ...]:
        rows.append(len(call[0][0] if call[0] else call[1]["x"]))
        return graph_answer(self, lowered, call)

    monkeypatch.setattr(Judge, "graph_answer", counted)
    batch, model = torch.export.Dim("batch", min=2, max=64), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fast = intarsia.compile(model.eval(), (torch.randn(3, 4),), dynamic_shapes=({0: batch},))
    assert fast.runs_graph and max(rows) == 3, rows
    rows.clear()
    fast = intarsia.compile(Largest(), (torch.randn(3, 4),), dynamic_shapes={"x": {0: batch}})
    assert max(rows) == 64 and "differs from the model" in str(fast.plan), "here it is to blame"


def test_in_a_large_model_each_size_is_at_its_maximum_in_a_call_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, shapes = Judge.answer, []

    def seen(self: Judge, call: Call, function: Any = None) -> Any:
        shapes.append(tuple((call[0][0] if call[0] else call[1]["x"]).shape))
        return answer(self, call, function)

    monkeypatch.setattr(Judge, "answer", seen)
    sizes = {0: torch.export.Dim("rows", min=2, max=8), 1: torch.export.Dim("columns", min=2, max=16)}
    for most, largest in ((1 << 30, {(2, 2), (3, 4), (8, 16)}), (0, {(2, 2), (3, 4), (8, 4), (3, 16)})):
        monkeypatch.setattr(size_examples, "_AT_ONCE_BYTES", most)
        shapes.clear()
        model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.GELU()).eval()
        intarsia.compile(model, (torch.randn(3, 4),), dynamic_shapes=(sizes,))
        assert set(shapes) == largest


class Resized(nn.Module):
    """PyTorch finds the weights of its neighbours in float32, so the image's far end is off by most."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.5, mode="bilinear")


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("model", "size"), [(Resized(), 64), (Resized(), 224), (nn.LayerNorm([3, 224, 224]), 224)]
)
def test_an_engine_about_as_near_to_float64_as_pytorch_is_right(
    model: nn.Module, size: int, engine: str
) -> None:
    x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0)) + 1
    fast = intarsia.compile(model.eval(), (x,), engines=engine, min_block_size=1)
    with torch.no_grad():
        precise = copy.deepcopy(model).double()(x.double())
        eager = float((model(x) - precise).abs().max())
    assert fast.plan.on_engines == 1.0, str(fast.plan)
    assert float((fast(x) - precise).abs().max()) <= 4 * eager + 128 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Approximate(GraphEngine):
    """An engine of float32 that takes another formula for GELU, off by 2e-4."""

    name: ClassVar[str] = "approximate"

    def unavailable(self) -> str | None:
        return None

    def build(self, module: fx.GraphModule) -> Program:
        quick = copy.deepcopy(module)
        for node in quick.graph.nodes:
            if node.target is torch.ops.aten.gelu.default:
                node.kwargs = {"approximate": "tanh"}
        quick.recompile()
        return lambda *inputs: tuple(quick(*inputs))


def test_a_tolerance_is_a_bound_and_permits_nothing_else() -> None:
    """It holds for engines of the model's own arithmetic; nothing shorter is tried where nobody measures."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.linspace(-4, 4, 64).reshape(8, 8)
    asked: dict[str, Any] = {"engines": [Approximate()], "min_block_size": 1}
    assert intarsia.compile(model, (x,), **asked).plan.on_engines < 1.0
    for more in ({"partition": "dependency"}, {"precision": "fp32"}):
        fast = intarsia.compile(model, (x,), tolerance=1e-2, **more, **asked)
        assert fast.plan.engines == ("approximate",) and not fast.notes
        exact = intarsia.compile(model, (x,), tolerance=1e-7, **more, **asked)
        assert exact.plan.on_engines < 1.0 and "tolerance=1e-07" in str(exact.plan)

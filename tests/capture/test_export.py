"""What torch.export takes, compile takes; what it refuses is refused with torch's own advice."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.fx.proxy
from torch import fx, nn
from torch.export import Dim

import intarsia
from intarsia.capture.export import capture
from intarsia.capture.export_context import short_stack_traces
from intarsia.errors import CaptureError, InputError
from intarsia.graph.nodes import source_line


class EnablesGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class EnablesGradInside(EnablesGrad):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = self.linear(x)
            with torch.no_grad():
                z = y * 2
        return y + z


class Vmapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sum() * row)(x)


class SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.matrix, x.t()).relu()


class RefusesEval(nn.Module):
    def eval(self) -> Any:
        raise RuntimeError("no eval here")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + float(self.training)


@pytest.mark.parametrize("kind", [EnablesGrad, EnablesGradInside, Vmapped, SparseBuffer])
def test_what_export_takes_compiles(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.rand(2, 4)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(intarsia.compile(model, (x,), fallback="error")(x), expected)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4)  # has its weights in a list, too
        self.positions: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.positions is None:
            self.positions = torch.arange(4.0)
        return self.cells(x + self.positions)[0]


def test_tensors_that_an_export_assigns_are_not_told_by_torch() -> None:
    """torch asks for buffers instead; what a run of the model changes, the compile finds by running it."""
    model, x = Remembers().eval(), torch.rand(3, 2, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fast = intarsia.compile(model, (x,))
    assert not any("assigned during export" in str(warning.message) for warning in told)
    torch.testing.assert_close(fast(x), model(x).detach())


def test_a_module_without_eval_is_captured_in_evaluation() -> None:
    model, x = RefusesEval(), torch.rand(2, 4)
    torch.testing.assert_close(intarsia.compile(model, (x,), fallback="error")(x), x.relu())
    assert model.training


def test_an_exported_module_compiles() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(intarsia.compile(program.module(), (x,))(x), model(x))


class Viewed(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.view(-1, 2).relu()


def test_an_exported_program_is_left_as_it_was() -> None:
    x = torch.rand(2, 4)
    program = torch.export.export(Viewed(), (x,))
    before = str(program.graph)
    for args in ((x,), ()):  # a program brings its own example
        torch.testing.assert_close(intarsia.compile(program, args)(x), Viewed()(x))
    assert str(program.graph) == before


def test_the_error_has_torchs_suggested_fixes() -> None:
    class Pinned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(3, 2)

    with pytest.raises(
        CaptureError, match=r"(?s)Constraints violated.*specialized it to be a constant.*Suggested fixes"
    ):
        intarsia.compile(Pinned(), (torch.rand(3, 2),), dynamic_shapes=({0: Dim("rows", max=9)},))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_a_named_dim_varies_as_export_allows(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {} if name == "GPT2" else {"num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**sizes, **more, use_cache=False)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = torch.randint(0, 50, (2, 6))
    shapes = {"input_ids": {0: Dim("batch")}}
    fast = intarsia.compile(model, kwargs={"input_ids": ids}, dynamic_shapes=shapes)
    for batch in (1, 2, 5):
        given = torch.randint(0, 50, (batch, 6))
        answer, expected = fast(input_ids=given), model(input_ids=given)
        torch.testing.assert_close(answer.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-4)


ROWS = intarsia.Input(min_shape=(1, 6), opt_shape=(2, 6), max_shape=(8, 6), dtype=torch.int64, domain=(0, 50))


@pytest.mark.parametrize("by", ["shapes", "all names", "Input"])
def test_sizes_vary_beside_a_flag_that_forward_takes_by_a_double_star(by: str) -> None:
    """transformers 5 takes `output_hidden_states` by **kwargs; torch.export fails with dynamic_shapes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model, ids = transformers.BertModel(config).eval(), torch.randint(0, 50, (2, 6))
    call = {"input_ids": ROWS if by == "Input" else ids, "output_hidden_states": True}
    shapes = {"input_ids": {0: Dim("rows", min=1, max=8)}}
    named: Any = {"shapes": shapes, "all names": {**shapes, "output_hidden_states": None}}
    fast = intarsia.compile(model, kwargs=call, dynamic_shapes=named.get(by), engines=["onnxruntime"])
    ids = torch.randint(0, 50, (5, 6))
    answer, expected = (each(input_ids=ids, output_hidden_states=True) for each in (fast, model))
    assert len(answer.hidden_states) == 2
    torch.testing.assert_close(answer.hidden_states[1], expected.hidden_states[1], rtol=1e-3, atol=1e-4)


# Nodes know the line they come from, though export does not read the whole stack for each of them.


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shifted(x).tanh()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)) * 2


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def lines(graph: fx.Graph) -> dict[str, str]:
    return {node.name: source_line(node, full=True) for node in graph.nodes}


def test_lines_are_those_that_torch_finds() -> None:
    x = torch.ones(2, 4)
    with torch.no_grad():
        whole = torch.export.export(Outer().eval(), (x,), strict=False).graph
    short = capture(Outer(), (x,)).graph
    assert lines(short) == lines(whole)
    assert all(lines(short)[name].rsplit(":")[0] == __file__ for name in ("add", "tanh", "mul"))


def test_torch_still_reads_stacks_by_the_name_that_is_replaced() -> None:
    """Where this fails, `short_stack_traces` replaces nothing: export is slower, and nothing else."""
    own = torch.fx.proxy.CapturedTraceback
    with short_stack_traces():
        assert torch.fx.proxy.CapturedTraceback is not own
        traces = [node.stack_trace for node in torch.export.export(Inner(), (torch.ones(2),)).graph.nodes]
    assert torch.fx.proxy.CapturedTraceback is own
    assert any(traces)
    assert all("\n" not in trace.replace("\n  File", "File") for trace in traces if trace)  # no source lines


def test_threads_that_export_at_once_leave_torch_as_it_was() -> None:
    own = torch.fx.proxy.CapturedTraceback
    inside, leave = threading.Barrier(2), threading.Event()

    def second() -> None:
        with short_stack_traces():
            inside.wait()
            leave.wait()

    other = threading.Thread(target=second)
    with short_stack_traces():
        other.start()
        inside.wait()
    assert torch.fx.proxy.CapturedTraceback is not own  # the other still exports
    leave.set()
    other.join()
    assert torch.fx.proxy.CapturedTraceback is own


class TakesMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        y = self.linear(x) + more["added"]
        return y * 2 if more["twice"] else y


@pytest.mark.parametrize(
    "sizes",
    [
        {"x": {0: Dim("n")}, "added": {0: Dim("n")}},
        {"x": {0: Dim("n")}, "more": {"added": {0: Dim("n")}, "twice": None}},
        ({0: Dim("n")}, {"added": {0: Dim("n")}, "twice": None}),
    ],
    ids=["by name", "by parameter", "by position"],
)
def test_arguments_of_a_double_starred_parameter_may_vary(sizes: Any) -> None:
    model, x = TakesMore().eval(), torch.randn(3, 4)
    keywords = {"twice": True, "added": torch.randn(3, 4)}
    program = capture(model, (x,), keywords, sizes)
    longer, added = torch.randn(5, 4), torch.randn(5, 4)
    result = program.module()(longer, twice=True, added=added)
    torch.testing.assert_close(result, model(longer, added=added, twice=True))
    assert "forward" not in vars(model)


def test_an_input_beside_a_double_starred_parameter() -> None:
    model, rows = TakesMore().eval(), intarsia.Input(min_shape=(1, 4), opt_shape=(3, 4), max_shape=(9, 4))
    keywords = {"added": rows, "twice": False}
    fast = intarsia.compile(model, (rows,), keywords, engines=["onnxruntime"], min_block_size=1)
    x, added = torch.randn(7, 4), torch.randn(7, 4)
    torch.testing.assert_close(fast(x, added=added, twice=False), model(x, added=added, twice=False))
    with pytest.raises(InputError, match="dynamic_shapes names dimension 2 of added"):
        intarsia.compile(
            model,
            (x,),
            {"added": added, "twice": False},
            dynamic_shapes={"x": {0: Dim("n")}, "added": {2: Dim("n")}},
        )

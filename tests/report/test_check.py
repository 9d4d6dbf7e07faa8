"""`intarsia.check`: what is equal is called equal, and what is not is located."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import intarsia
from intarsia import Input
from intarsia.cli import zoo
from intarsia.engines import GraphEngine
from intarsia.errors import InputError
from intarsia.graph.plan import Plan
from intarsia.report.check import drawn_calls, edge_calls


class Net(nn.Module):
    """A few layers with names, in the order they run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(F.gelu(self.norm(self.first(x)))), -1)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def onnx_file(net: Net, x: torch.Tensor, tmp_path: Path) -> Path:
    pytest.importorskip("onnxscript")
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    return tmp_path / "net.onnx"


def test_the_model_s_own_compile_is_equal(net: Net, x: torch.Tensor) -> None:
    report = intarsia.check(net, (x,))
    assert report.equal and report.difference is None, str(report)
    names = [comparison.inputs for comparison in report.comparisons]
    assert names[:2] == ["the example", "drawn inputs 0"] and "a NaN" in names and "zeros" in names


def test_sizes_are_checked_at_their_ends(net: Net) -> None:
    rows = Input(min_shape=(1, 8), opt_shape=(3, 8), max_shape=(9, 8))
    seen: list[int] = []

    def candidate(x: torch.Tensor) -> Any:
        seen.append(len(x))
        return net(x)

    report = intarsia.check(net, (rows,), candidate, edges=False)
    assert report.equal and {1, 9} <= set(seen)
    wrong = intarsia.check(net, (rows,), lambda x: net(x) + (len(x) == 9), edges=False)
    assert [c.inputs for c in wrong.comparisons if c.fault] == ["the largest sizes"]


def test_onnx_and_openvino_files(net: Net, x: torch.Tensor, onnx_file: Path, tmp_path: Path) -> None:
    assert intarsia.check(net, (x,), onnx_file).equal
    openvino = pytest.importorskip("openvino")
    model = openvino.convert_model(net, example_input=x)
    openvino.save_model(model, tmp_path / "exact.xml", compress_to_fp16=False)
    openvino.save_model(model, tmp_path / "short.xml", compress_to_fp16=True)
    assert intarsia.check(net, (x,), tmp_path / "exact.xml").equal
    report = intarsia.check(net, (x,), tmp_path / "short.xml", edges=False)
    assert report.difference is not None and report.difference.node == "linear"
    assert intarsia.check(net, (x,), tmp_path / "short.xml", edges=False, tolerance=0.01).equal


def test_an_onnx_file_that_differs_is_located(
    net: Net, x: torch.Tensor, onnx_file: Path, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(onnx_file)
    (norm,) = (node for node in model.graph.node if node.op_type == "LayerNormalization")
    epsilon = next(attribute for attribute in norm.attribute if attribute.name == "epsilon")
    epsilon.f = 0.1  # as in an exporter that forgets the model's own
    onnx.save(model, onnx_file)
    reproduction = tmp_path / "reproduction.pt2"
    report = intarsia.check(net, (x,), onnx_file, reproduction=reproduction)
    assert not report.equal and report.difference is not None
    assert report.difference.op == "aten.layer_norm.default" and report.difference.module == "norm"
    assert report.difference.source.startswith("normalization.py:")
    assert "linear" in report.difference.last_equal
    assert "first difference: layer_norm" in str(report)
    assert report.difference.reproduction == str(reproduction)
    program = torch.export.load(reproduction)
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.layer_norm.default
    ]
    program.module()(*program.example_inputs[0])


def test_a_saved_file_and_a_program(net: Net, x: torch.Tensor, tmp_path: Path) -> None:
    intarsia.save(intarsia.compile(net, (x,), engines="onnxruntime"), tmp_path / "net.intarsia")
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "net.pt2")
    for name in ("net.intarsia", "net.pt2"):
        assert intarsia.check(net, (x,), tmp_path / name).equal


def _wrong_gelu(module: fx.GraphModule, inputs: Any) -> Any:
    """A backend of torch.compile that takes one activation for another."""
    for node in module.graph.nodes:
        if "gelu" in str(node.target):
            node.target, node.kwargs = torch.nn.functional.gelu, {"approximate": "tanh"}
    module.recompile()
    return module.forward


def test_a_module_of_torch_compile_is_located(net: Net, x: torch.Tensor, tmp_path: Path) -> None:
    assert intarsia.check(net, (x,), torch.compile(net, backend="eager")).equal
    torch.compiler.reset()
    path = tmp_path / "reproduction.pt2"
    compiled = torch.compile(net, backend=_wrong_gelu)
    report = intarsia.check(net, (x,), compiled, edges=False, reproduction=path)
    assert report.difference is not None and report.difference.op == "aten.gelu.default"
    assert report.difference.reproduction == str(path)
    program = torch.export.load(path)
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["aten.gelu.default"]
    again = intarsia.check(program, candidate=torch.compile(program.module(), backend=_wrong_gelu), draws=0)
    assert not again.equal


@dataclass(frozen=True)
class OffByAThousandth(GraphEngine):
    """Takes everything, and returns a softmax a little too large."""

    name: ClassVar[str] = "off"

    def unavailable(self) -> str | None:
        return None

    def build(self, module: fx.GraphModule) -> Any:
        has_softmax = any("softmax" in str(node.target) for node in module.graph.nodes)
        factor = 1.001 if has_softmax else 1.0
        return lambda *inputs: tuple(value * factor for value in module(*inputs))


def test_the_node_of_a_compiled_module_is_located(net: Net, x: torch.Tensor) -> None:
    fast = intarsia.compile(net, (x,), engines=[OffByAThousandth()], verify=False, min_block_size=1)
    report = intarsia.check(net, (x,), fast, edges=False)
    assert report.difference is not None and report.difference.op == "aten.softmax.int"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_module_with_the_same_parts_is_located(
    net: Net, x: torch.Tensor, is_compiled: bool, tmp_path: Path
) -> None:
    """Also where torch.compile hides them: its backend computes every node rightly, from other weights."""
    other = Net().eval()
    other.load_state_dict({**net.state_dict(), "norm.bias": torch.full((16,), 0.5)})
    torch.compiler.reset()
    candidate = torch.compile(other, backend="eager") if is_compiled else other
    path = tmp_path / "reproduction.pt2"
    report = intarsia.check(net, (x,), candidate, edges=False, reproduction=path)
    assert report.difference is not None and report.difference.node == "norm"
    assert report.difference.source.startswith("normalization.py:")
    program = torch.export.load(path)
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == [
        "aten.layer_norm.default"
    ]
    torch.testing.assert_close(program.module()(*program.example_inputs[0])[0], net.norm(net.first(x)))


def test_a_plain_function_shows_its_results_alone(net: Net, x: torch.Tensor) -> None:
    report = intarsia.check(net, (x,), lambda x: net(x) * 1.01, edges=False)
    assert not report.equal and report.difference is None
    assert "a plain function shows only its results" in report.notes[0]


def test_a_difference_that_a_comparison_of_examples_misses(net: Net, x: torch.Tensor) -> None:
    report = intarsia.check(net, (x,), lambda x: net(torch.nan_to_num(x)))
    assert [c.inputs for c in report.comparisons if c.fault] == ["a NaN"]


def test_what_cannot_be_checked_is_a_sentence(net: Net, x: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        intarsia.check(net, (x,), tmp_path / "no.onnx")
    with pytest.raises(InputError, match="give a callable or the path"):
        intarsia.check(net, (x,), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the model fails on its example inputs: RuntimeError"):
        intarsia.check(net, (x.T,), net)
    with pytest.raises(InputError, match="two runs of the model differ"):
        intarsia.check(_Random(), (x,), net)
    report = intarsia.check(net, (x,), lambda x: (net(x), x), draws=0, edges=False)
    assert report.comparisons[0].fault == "it returns 2 results; the model 1"


class _Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_inputs_are_drawn_like_the_example() -> None:
    ids, mask = torch.tensor([[3, 7, 5]]), torch.ones(1, 3, dtype=torch.bool)
    calls = dict(drawn_calls(((ids, torch.full((4,), 9.0)), {"mask": mask}), 2))
    for args, kwargs in calls.values():
        assert int(args[0].min()) >= 3 and int(args[0].max()) <= 7 and args[0].dtype == torch.int64
        assert torch.equal(args[1], torch.full((4,), 9.0)) and bool(kwargs["mask"].all())
    assert [name for name, _ in edge_calls(((ids,), {}))] == [
        "the least integer everywhere",
        "the largest integer everywhere",
    ]


def test_results_of_another_kind_and_inputs_written_to_are_told(net: Net, x: torch.Tensor) -> None:
    def compared(candidate: Any) -> str:
        report = intarsia.check(net, (x,), candidate, draws=0, edges=False)
        assert not report.equal
        return str(report)

    assert "output 0 is a NoneType; the model returns a Tensor" in compared(lambda x: None)
    assert "output 0 is a ndarray" in compared(lambda x: net(x).detach().numpy())
    assert "it changes tensor 0 of the call differently" in compared(lambda x: (net(x), x.zero_())[0])


def test_a_file_of_other_weights_is_called_that(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    fast = intarsia.compile(nn.Linear(8, 8).eval(), (x,), engines=["onnxruntime"], min_block_size=1)
    intarsia.save(fast, tmp_path / "linear.intarsia")
    report = intarsia.check(nn.Linear(8, 8).eval(), (x,), tmp_path / "linear.intarsia")
    assert not report.equal and "it was compiled with other weights: weight, bias" in report.notes


# `explain` says before a compile what `compile` then does.


def _placement(plan: Plan) -> list[tuple[str, list[str]]]:
    return [(segment.engine, [node.name for node in segment.nodes]) for segment in plan.segments]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_explain_and_compile_agree(name: str) -> None:
    specimen = zoo.specimen(name)
    compiled = intarsia.compile(specimen.model, specimen.args, specimen.kwargs)
    assert isinstance(compiled, intarsia.Compiled)
    explained = intarsia.explain(specimen.model, specimen.args, specimen.kwargs)
    assert _placement(explained.plan) == _placement(compiled.plan)

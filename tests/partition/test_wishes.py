"""A wish is obeyed or refused: names that mean nothing, options given twice, and words that must win."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import intarsia
from intarsia.backend import intarsia_backend
from intarsia.errors import InputError, IntarsiaError, PartitionError
from intarsia.graph.nodes import _clean_path, compute_nodes, op_name
from intarsia.partition import STRATEGIES, PartitionOptions, SupportTable
from intarsia.partition.names import op_matcher

from .graphs import lower

pytest.importorskip("onnxruntime", reason="an engine under test")
pytest.importorskip("openvino", reason="an engine under test")

BOTH = ["onnxruntime", "openvino"]
X = torch.rand(2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3))).softmax(-1)


class Choosy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def yes(a: torch.Tensor) -> torch.Tensor:
            return torch.cond(a.mean() > 9, lambda b: torch.tanh(b) * 2, lambda b: torch.relu(b) + 1, (a,))

        return torch.cond(x.sum() > 0, yes, lambda a: torch.sigmoid(a) * 3, (x + 1,))


def compile_net(**choices) -> intarsia.Compiled:
    torch.manual_seed(0)
    model = Net().eval()
    fast = intarsia.compile(model, (X,), engines=BOTH, **choices)
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=1e-4, atol=1e-5)
    return fast


def on(fast: intarsia.Compiled, engine: str) -> set[str]:
    segments = [segment for segment in fast.plan.segments if segment.engine == engine]
    return {op_name(node).split(".")[1] for segment in segments for node in segment.nodes}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"torch_executed_ops": ["aten::rellu"]}, r"torch_executed_ops names 'aten::rellu'.*'aten::relu'"),
        ({"torch_executed_ops": [torch.ops.aten.lgamma]}, "torch_executed_ops names .*lgamma"),
        ({"torch_executed_modules": ["haed.1"]}, r"torch_executed_modules names 'haed.1'.*'head.1'"),
        ({"torch_executed_modules": [nn.LSTM]}, "torch_executed_modules names 'LSTM'"),
        ({"atomic": [("aten::conv2d", "aten::reluu")]}, r"atomic names 'aten::reluu'.*'aten::relu'"),
        ({"backend_support_map": {"openvino": ["aten::meann"]}}, "backend_support_map names 'aten::meann'"),
        ({"backend_support_map": {"openvin": ["aten::mean"]}}, "backend_support_map names 'openvin'"),
        ({"memory_budget": {"ort": 1000}}, "memory_budget names 'ort'"),
        ({"min_block_size": "3"}, "min_block_size='3'"),
    ],
)
@pytest.mark.parametrize("door", [intarsia.compile, intarsia.explain])
def test_a_name_that_means_nothing_is_an_error(door, choices, message) -> None:
    with pytest.raises(PartitionError, match=message):
        door(Net(), (X,), engines=BOTH, **choices)


@pytest.mark.parametrize("name", ["relu", "aten::relu", torch.relu, F.relu, torch.ops.aten.relu.default])
def test_an_op_by_every_name(name: object) -> None:
    assert on(compile_net(torch_executed_ops=[name], min_block_size=1), "pytorch") == {"relu"}


def test_an_op_answers_to_what_it_lowers_to_and_comes_from() -> None:
    fast = compile_net(torch_executed_ops=["aten::convolution", "aten::addmm"], min_block_size=1)
    assert on(fast, "pytorch") == {"conv2d", "linear"}
    gm = lower(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.rand(2, 4),))
    found = {op_name(node) for node in compute_nodes(gm.graph) if op_matcher("aten::linear")(node)}
    assert "aten.addmm.default" in found and "aten.relu.default" not in found


def test_an_op_answers_to_the_view_it_replaces() -> None:
    class Viewed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().view(2, -1) * 2

    fast = intarsia.compile(
        Viewed(), (X,), engines=["onnxruntime"], torch_executed_ops=["aten::view"], min_block_size=1
    )
    assert on(fast, "pytorch") == {"reshape"}


def test_an_op_does_not_answer_to_one_of_many_that_it_lowers_to() -> None:
    program = torch.export.export(nn.RMSNorm(4), (torch.rand(2, 4),))
    (norm,) = compute_nodes(program.graph)
    assert op_name(norm).startswith("aten.rms_norm") and not op_matcher("aten::mul")(norm)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_obeys_the_support_map(strategy: str) -> None:
    given = {"openvino": ["aten::linear"], "onnxruntime": ["aten::conv2d"]}
    fast = compile_net(partition=strategy, min_block_size=1, backend_support_map=given)
    assert on(fast, "openvino") == {"linear"} and on(fast, "onnxruntime") == {"conv2d"}


def test_run_on_wins_over_the_work_rule() -> None:
    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with intarsia.run_on("openvino"):
                return torch.tanh(x)

    assert on(intarsia.compile(Small(), (torch.rand(3),), engines=BOTH), "openvino") == {"tanh"}


@pytest.mark.parametrize("door", [intarsia.compile, intarsia.explain])
def test_options_and_names_at_once_are_an_error(door) -> None:
    with pytest.raises(PartitionError, match="options and min_block_size are both given"):
        door(Net(), (X,), options=PartitionOptions(), min_block_size=3)
    with pytest.raises(TypeError, match="'min_blok_size'; did you mean 'min_block_size'"):
        door(Net(), (X,), min_blok_size=3)


def test_atomic_and_memory_budget_by_name() -> None:
    fast = compile_net(min_block_size=1, memory_budget={"onnxruntime": 900, "openvino": 900})
    assert len(compile_net(min_block_size=1).plan) == 1 and len(fast.plan) == 2
    chain = ("aten::conv2d", "aten::relu")
    fast = compile_net(min_block_size=1, atomic=[chain], torch_executed_ops=["aten::relu"])
    assert on(fast, "pytorch") == {"conv2d", "relu"}


def test_explain_says_what_compile_does_and_descends_into_bodies() -> None:
    choices = {"engines": ["openvino"], "min_block_size": 1}
    told = intarsia.explain(Choosy(), (X,), **choices)
    fast = intarsia.compile(Choosy(), (X,), **choices)
    assert [s.engine for s in told.plan.segments] == [s.engine for s in fast.plan.segments]
    assert set(told.bodies) == {"cond.true_graph_0", "cond.false_graph_0"}
    assert len(told.bodies["cond.true_graph_0"].bodies) == 2
    assert "body cond.false_graph_0:" in str(told) and '"bodies"' in told.to_json()


def test_plans_of_bodies_inside_bodies_are_all_there() -> None:
    fast = intarsia.compile(Choosy(), (X,), engines=["openvino"], min_block_size=1)
    assert set(fast.body_plans) == {
        "cond.true_graph_0",
        "cond.true_graph_0/cond.true_graph_0",
        "cond.true_graph_0/cond.false_graph_0",
        "cond.false_graph_0",
    }
    for x in (X, -9 * X, X + 20):
        torch.testing.assert_close(fast(x), Choosy()(x))


def test_names_in_bodies_are_found() -> None:
    fast = intarsia.compile(
        Choosy(), (X,), engines=["onnxruntime"], min_block_size=1, torch_executed_ops=["aten::sigmoid"]
    )
    assert "torch_executed_ops names aten.sigmoid" in str(fast.body_plans["cond.false_graph_0"])


def test_full_compilation_holds_in_bodies() -> None:
    with pytest.raises(PartitionError, match=r"torch_executed_ops names aten\.sigmoid"):
        intarsia.compile(
            Choosy(),
            (X,),
            engines=["onnxruntime"],
            require_full_compilation=True,
            torch_executed_ops=["aten::sigmoid"],
        )
    fast = intarsia.compile(Choosy(), (X,), engines=["onnxruntime"], require_full_compilation=True)
    torch.testing.assert_close(fast(X), Choosy()(X))


def test_full_compilation_of_views_alone() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(6, 64).t().unsqueeze(0)

    fast = intarsia.compile(Views(), (X,), engines=["onnxruntime"], require_full_compilation=True)
    assert fast.plan.engines == ("onnxruntime",)
    torch.testing.assert_close(fast(X), Views()(X))


@pytest.mark.parametrize(
    "path",
    [
        "layers.0.mlp",
        "L['self'].layers.0.mlp",
        "L['self'].layers[0].mlp",
        "L['model'].layers.0.mlp",
        "L['self']._modules['layers']._modules['0']._modules['mlp']",
    ],
)
def test_paths_read_as_the_model_writes_them(path: str) -> None:
    assert _clean_path(path) == "layers.0.mlp"


def test_a_priority_names_known_engines() -> None:
    gm = lower(nn.ReLU(), (torch.rand(2),))
    for strategy in STRATEGIES.values():
        with pytest.raises(PartitionError, match="backend_priority names 'b'"):
            strategy(gm, SupportTable(("a", "pytorch")), PartitionOptions(backend_priority=("b",)))


@pytest.mark.parametrize("wrong", [3, [], intarsia.Measured])
def test_what_is_no_strategy_is_refused(wrong: object) -> None:
    for ask in (intarsia.compile, intarsia.explain):
        with pytest.raises(PartitionError, match="is not a strategy"):
            ask(nn.Linear(2, 2), (torch.ones(1, 2),), partition=wrong)


@pytest.mark.parametrize("wrong", [float("nan"), -1, 0, "a"])
def test_what_is_no_time_limit_is_refused(wrong: object) -> None:
    with pytest.raises(InputError, match="build_limit_s="):
        intarsia.compile(nn.Linear(2, 2), (torch.ones(1, 2),), build_limit_s=wrong)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"verify": "no"}, "verify='no'; give True or False"),
        ({"cuda_graphs": "dynamic"}, "cuda_graphs='dynamic'; give True, False, 'static' or None"),
        ({"build_limit_s": True}, "build_limit_s=True; give seconds"),
        ({"min_block_size": True}, "min_block_size=True must be a whole number"),
        ({"require_full_compilation": "yes"}, "require_full_compilation='yes'; give True or False"),
        ({"torch_executed_ops": "relu"}, "torch_executed_ops='relu' is not a list of names"),
        ({"backend_priority": "openvino"}, "backend_priority='openvino' is not a list of names"),
        ({"memory_budget": -1}, "memory_budget=-1 names no engine"),
        ({"memory_budget": {"openvino": "1 GB"}}, "memory_budget of openvino is '1 GB' bytes"),
        ({"backend_support_map": ["openvino"]}, r"backend_support_map=\['openvino'\] names no engine"),
        ({"backend_priority": ["opnvino"]}, "backend_priority names 'opnvino', but the engines are"),
    ],
)
def test_values_that_mean_nothing_are_refused(wish: dict[str, object], told: str) -> None:
    for partition in (None, "dependency", intarsia.Measured(budget_s=1)):
        with pytest.raises((InputError, PartitionError), match=told):
            intarsia.compile(nn.Linear(2, 2), (torch.ones(1, 2),), partition=partition, **wish)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[1], True, "a", 0, float("nan")])
def test_what_is_no_budget_is_refused(wrong: object) -> None:
    with pytest.raises(PartitionError, match="must be more than 0 seconds"):
        intarsia.Measured(budget_s=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [3, "openvino", intarsia.OpenVINO, ["openvino"], intarsia.OpenVINO()])
def test_what_is_no_list_of_engines_is_refused(wrong: object) -> None:
    with pytest.raises(PartitionError, match="candidates"):
        intarsia.Measured(candidates=wrong)  # type: ignore[arg-type]


def test_a_priority_may_name_pytorch_beside_measurement() -> None:
    x = torch.ones(1, 2)
    for partition in ("dependency", intarsia.Measured(budget_s=1)):
        fast = intarsia.compile(
            nn.Linear(2, 2), (x,), partition=partition, backend_priority=["openvino", "pytorch"]
        )
        assert fast(x).shape == (1, 2)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"engines": 5}, "engines=5; pass engines or their names"),
        ({"engines": intarsia.OpenVINO}, "pass engines or their names"),
        ({"engines": ["opnvino"]}, "opnvino"),
        ({"tolerance": "a"}, "tolerance='a' must be a share"),
        ({"tolerance": [0.1]}, "must be a share"),
        ({"fallback": "zzz"}, "fallback='zzz'; give 'parts', 'eager' or 'error'"),
        ({"options": {"min_block_size": 1}}, "give a PartitionOptions, or its fields by name"),
        ({"verify": "no"}, "verify='no'"),
        ({"examples": 5}, "examples are 5; give a list of calls"),
        ({"rewrite": 5}, "rewrite=5; pass patterns"),
    ],
)
def test_every_door_refuses_what_compile_refuses(wish: dict[str, object], told: str) -> None:
    model, x = nn.Linear(2, 2).eval(), torch.ones(1, 2)
    options: Any = wish
    doors: list[Callable[[], object]] = [
        lambda: intarsia.compile(model, (x,), **options),
        lambda: torch.compile(model, backend=intarsia_backend, options=options)(x),
    ]
    if "fallback" not in wish:
        doors.append(lambda: intarsia.tune(model, lambda: model(x), **options))
    for door in doors:
        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises((IntarsiaError, BackendCompilerFailed), match=told):
            door()


def test_what_is_no_call_is_refused() -> None:
    for ask in (intarsia.compile, intarsia.explain):
        with pytest.raises(InputError, match="args must be a tuple of inputs, not a int"):
            ask(nn.Linear(2, 2), 5)  # type: ignore[arg-type, operator]
        with pytest.raises(InputError, match="kwargs must be inputs by name, not a int"):
            ask(nn.Linear(2, 2), (torch.ones(1, 2),), 5)  # type: ignore[arg-type, operator]

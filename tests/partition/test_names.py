"""Names and values in options: what they may be, and a sentence for what they may not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

import intarsia
from intarsia.convert import registry
from intarsia.engines import OnnxRuntime, Program
from intarsia.errors import EngineError, InputError, PartitionError
from intarsia.network import Network

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


def compiled(**options: Any) -> Any:
    return intarsia.compile(net(), (X,), engines=["onnxruntime"], min_block_size=1, **options)


@pytest.mark.parametrize(
    "names", ["all", ["all"], ["*"], ["aten::*"], ["aten.*", "aten::conv2d"], registry.targets()]
)
def test_a_support_map_may_name_what_the_graph_has_not(names: Any) -> None:
    assert compiled(backend_support_map={"onnxruntime": names}).plan.engines == ("onnxruntime",)


def test_names_may_be_decomposed_ones_and_globs() -> None:
    (engines,) = {compiled(backend_support_map={"onnxruntime": ["aten::addmm", "aten::t"]}).plan.engines}
    assert engines == ("onnxruntime", "pytorch")
    assert compiled(torch_executed_ops=["aten::re*"]).plan.engines == ("onnxruntime", "pytorch")
    with pytest.raises(PartitionError, match=r"'aten::rele', which no node is; did you mean 'aten::relu'"):
        compiled(backend_support_map={"onnxruntime": ["aten::rele"]})


def test_iterators_are_read_once_and_stay() -> None:
    assert compiled(torch_executed_ops=(n for n in ["relu"])).plan.engines == ("onnxruntime", "pytorch")
    assert compiled(torch_executed_modules=iter(["0", "1"])).plan.engines == ("pytorch",)
    assert compiled(backend_support_map={"onnxruntime": (n for n in ["relu", "linear"])}).plan.engines == (
        "onnxruntime",
    )
    chain = (n for n in ["linear", "relu"])
    fast = compiled(atomic=iter([chain]), backend_support_map={"onnxruntime": ["relu"]})
    assert fast.plan.engines == ("pytorch",)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"backend_support_map": {"onnxruntime": "aten::relu"}},
            "is not a list of names; give e.g. ['aten::relu']",
        ),
        (
            {"backend_support_map": {"onnxruntime": None}},
            "backend_support_map of onnxruntime=None is not a list",
        ),
        ({"backend_support_map": {"pytorch": ["relu"]}}, "names 'pytorch', which takes every operator"),
        ({"memory_budget": {"pytorch": 100}}, "names 'pytorch', which takes every operator"),
        ({"memory_budget": None}, "memory_budget=None names no engine"),
        ({"atomic": ["aten::relu"]}, "atomic='aten::relu' is not a list of names"),
        ({"atomic": None}, "atomic=None is not a list of names"),
        ({"atomic": [None]}, "atomic=None is not a list of names"),
        ({"torch_executed_ops": None}, "torch_executed_ops=None is not a list of names"),
        ({"torch_executed_modules": None}, "torch_executed_modules=None is not a list of names"),
    ],
)
def test_values_that_mean_nothing_are_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PartitionError) as error:
        compiled(**options)
    assert sentence in str(error.value)


def test_a_chain_that_matches_nothing_is_told() -> None:
    fast = compiled(atomic=[["relu", "linear"], ["linear", "relu"]])
    (note,) = [note for note in fast.notes if note.startswith("atomic")]
    assert "('relu', 'linear') matches nothing" in note


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({"scale": {0: Dim("n")}}, "names dimension 0 of scale, which has 0 dimensions"),
        ({"x": {5: Dim("n")}}, "names dimension 5 of x, which has 2 dimensions"),
        ({"x": {"0": Dim("n")}}, "names dimension '0' of x"),
        ({"scaled": {0: Dim("n")}}, "not an argument of the call; did you mean 'scale'"),
        (({0: Dim("n")}, None, None), "dynamic_shapes has 3 entries; the call has 2: "),
        ({"x": {0: "batch"}}, "gives 'batch' for dimension 0 of x; give a torch.export.Dim"),
        ({"x": "batch"}, "gives 'batch' for x"),
        ("batch", "dynamic_shapes='batch'"),
    ],
)
@pytest.mark.parametrize("function", [intarsia.compile, intarsia.explain])
def test_dynamic_shapes_that_mean_nothing_are_a_sentence(
    shapes: Any, sentence: str, function: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as error:
        function(Scaled(), (X, torch.tensor(2.0)), dynamic_shapes=shapes)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


class Variadic(nn.Module):
    def forward(self, *parts: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return torch.relu(sum(parts, *named.values()))


ROWS = {0: Dim("rows", min=1, max=8)}


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ((ROWS, ROWS, ROWS), r"has 3 entries; the call has 2: parts, last \(what \*args takes is one entry"),
        ({"parts": ROWS}, "parts holds 2 values, and dynamic_shapes gives it {0: "),
        ({"parts": (ROWS,)}, "parts holds 2 values, .*; give a tuple with an entry for each value"),
        (
            {"named": {"last": ROWS}},
            r"names 'named', which is not an argument of the call; they are parts, last",
        ),
    ],
)
def test_dynamic_shapes_of_variadic_arguments_are_a_sentence(shapes: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        intarsia.compile(Variadic(), (X, X), {"last": X}, dynamic_shapes=shapes)
    fast = intarsia.compile(Variadic(), (X, X), dynamic_shapes=((ROWS, ROWS),))
    torch.testing.assert_close(fast(X[:1], X[:1]), torch.relu(2 * X[:1]))


def test_what_a_double_star_parameter_takes_has_sizes_by_its_own_name() -> None:
    model, shapes = Variadic(), {"parts": (ROWS, ROWS), "last": ROWS}
    fast = intarsia.compile(model, (X, X), {"last": X}, dynamic_shapes=shapes)
    torch.testing.assert_close(fast(X[:1], X[:1], last=X[:1]), torch.relu(3 * X[:1]))
    assert "forward" not in vars(model)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y + 1 if y.sum() > 0 else y)


def test_what_torch_dumps_goes_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    import logging

    class Keeps(logging.Handler):
        text = ""

        def emit(self, record: logging.LogRecord) -> None:
            self.text += record.getMessage()

    log, keeps = logging.getLogger("intarsia.torch"), Keeps()
    log.addHandler(keeps)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        intarsia.compile(Branches().eval(), (X,))
    finally:
        log.removeHandler(keeps)
        log.setLevel(logging.NOTSET)
        log.propagate = True
    assert "def forward" not in capfd.readouterr().err
    assert "def forward" in keeps.text


CALLS: list[int] = []


class Failing(OnnxRuntime):
    """ONNX Runtime whose programs fail from a call on."""

    name = "failing"

    def build(self, net: Network) -> Program:
        program = super().build(net)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            CALLS.append(1)
            if len(CALLS) > 10:
                raise RuntimeError("the engine fell over")
            return program(*tensors)

        return run


def test_full_compilation_holds_at_a_call_too() -> None:
    fast = intarsia.compile(net(), (X,), engines=[Failing()], require_full_compilation=True)
    while len(CALLS) < 10:
        fast(X)
    with pytest.raises(EngineError, match=r"the engine fell over.*require_full_compilation=True forbids"):
        fast(X)


class Results(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"a": y, "b": [y.relu() * 2, (x + 1, {"c": y})]}


def test_traced_modules_give_their_lists_and_dictionaries() -> None:
    model = fx.symbolic_trace(Results().eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    assert fast.plan.engines == ("onnxruntime",)
    ours, theirs = fast(X), model(X)
    assert type(ours) is dict and type(ours["b"]) is list and type(ours["b"][1][1]) is dict
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

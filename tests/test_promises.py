"""Every promise of the README, each by a test with its words; single defects are tested elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import OnnxRuntime, Program, default_engines
from intarsia.errors import EngineError, InputError, IntarsiaError, PartitionError
from intarsia.lower.decompositions import register_decomposition, unregister_decomposition
from intarsia.network import Network
from intarsia.pipeline import split

pytest.importorskip("onnxruntime", reason="an engine under test")
pytest.importorskip("openvino", reason="an engine under test")

ORT = "onnxruntime"
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Engines know all of it but `i0`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.special.i0(torch.relu(self.conv(x)) + 1)  # lowering names its node anew
        return torch.softmax(self.head(x.mean((2, 3))), -1)


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.erf(torch.tanh(x * 2) + 1) - 0.5)


class Gated(nn.Module):
    """What torch.export cannot take: the values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return y * 2 if float(y.sum()) > 0 else y - 1


@dataclass(frozen=True)
class Faulty(OnnxRuntime):
    """ONNX Runtime, real but for one fault, which its `broken` list switches on after compiling."""

    fault: str = ""
    broken: tuple[list[bool], ...] = ()
    name: ClassVar[str] = "faulty"

    def build(self, net: Network) -> Program:
        if self.fault == "build":
            raise EngineError("it cannot be built")
        program = super().build(net)

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if self.broken and self.broken[0]:
                raise RuntimeError("it crashed")
            made = program(*inputs)
            return tuple(y * 1.01 for y in made) if self.fault == "wrong" else made

        return run


def compiled(model: nn.Module, x: torch.Tensor = X, **options: Any) -> Any:
    """The model compiled with small blocks, and found equal to itself."""
    options.setdefault("engines", [ORT])
    fast = intarsia.compile(model.eval(), (x,), min_block_size=1, **options)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    return fast


def operators_on(fast: Any, engine: str) -> set[str]:
    segments = [segment for segment in fast.plan.segments if segment.engine == engine]
    return {str(node.target) for segment in segments for node in segment.nodes}


# 1. It never fails where PyTorch works.


def test_a_missing_converter_sends_those_nodes_and_only_those_to_pytorch() -> None:
    assert operators_on(compiled(Net()), "pytorch") == {"aten.i0.default"}


def test_a_refused_argument_sends_that_node_to_pytorch() -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.tanh(x).double()).float() * 2

    fast = compiled(Doubles(), engines=["openvino"])  # OpenVINO has no float64
    assert "aten.relu.default" in operators_on(fast, "pytorch")
    assert {"aten.tanh.default", "aten.mul.Tensor"} <= operators_on(fast, "openvino")


def test_an_engine_that_fails_to_build_leaves_its_nodes_to_the_next_engine() -> None:
    assert compiled(Plain(), engines=[Faulty(fault="build"), "openvino"]).plan.engines == ("openvino",)


def test_an_engine_that_crashes_leaves_its_nodes_to_pytorch() -> None:
    broken: list[bool] = []
    fast = compiled(Plain(), engines=[Faulty(broken=(broken,))])
    assert fast.plan.engines == ("faulty",)
    broken.append(True)
    with pytest.warns(UserWarning, match="faulty failed at a call .*it crashed.*PyTorch runs this segment"):
        torch.testing.assert_close(fast(X + 1), Plain()(X + 1))


def test_an_engine_that_answers_wrongly_leaves_its_nodes_to_the_next_engine() -> None:
    fast = compiled(Plain(), engines=[Faulty(fault="wrong"), "openvino"])
    assert "faulty" not in fast.plan.engines and "faulty answers wrongly" in str(fast.plan)


def test_a_model_that_export_cannot_take_is_compiled_in_parts() -> None:
    fast = compiled(Gated(), torch.randn(2, 8))
    assert set(fast.parts) == {"body"}
    assert any("the model is not captured as a whole" in note for note in fast.notes)


# 2. It never answers wrongly in silence.


@pytest.fixture
def wrong_decomposition() -> Any:
    operator = torch.ops.aten.logaddexp2.default
    register_decomposition(operator)(lambda self, other: self * 1.0)
    yield operator
    unregister_decomposition(operator)


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logaddexp2(torch.tanh(x), x + 1) * 2


def test_the_graph_is_compared_with_the_model(wrong_decomposition: Any) -> None:
    assert any(f"decomposition of {wrong_decomposition} is not used" in n for n in compiled(Sums()).notes)


def test_every_piece_is_compared_element_by_element() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.tanh(x), torch.full_like(x, -1e9)])  # huge beside what is 1 % off

    assert compiled(Masked(), engines=[Faulty(fault="wrong")]).plan.engines == ("pytorch",)


def test_the_whole_is_compared_with_the_model() -> None:
    """Zeros in padded rows come of a path that capture does not take; the answer is the model's still."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False, False, True, True], [False] * 4])
    fast = intarsia.compile(model, (x,), {"src_key_padding_mask": padding})
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(fast(x, src_key_padding_mask=padding), expected, rtol=1e-4, atol=1e-5)


def test_verify_false_skips_that() -> None:
    fast = intarsia.compile(Plain(), (X,), engines=[Faulty(fault="wrong")], min_block_size=1, verify=False)
    assert fast.plan.engines == ("faulty",)
    assert not torch.allclose(fast(X), Plain()(X), rtol=1e-4)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.randn(3, 3, 8, 8), r"input x has shape \(3, 3, 8, 8\)"),
        (X.double(), "input x .*float64"),
        (X.to("meta"), "input x .*meta"),
    ],
)
def test_inputs_of_another_shape_dtype_or_device_are_refused_by_name(other: torch.Tensor, said: str) -> None:
    fast = compiled(Plain())
    with pytest.raises(InputError, match=said):
        fast(other)


def test_calls_after_a_weight_was_changed_in_place_are_refused_by_name() -> None:
    model = Net()
    fast = compiled(model)
    with torch.no_grad():
        model.head.bias.add_(1)
    with pytest.raises(IntarsiaError, match=r"head\.bias"):
        fast(X)


# 3. It tells why.


def test_the_plan_has_the_reason_of_every_node_that_did_not_go_where_you_hoped() -> None:
    said = str(compiled(Net()).plan)
    assert "not on onnxruntime" in said and "aten.i0.default: no converter" in said


def test_explain_tells_the_same_without_building_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compiled(Net()).plan

    def never(*_: Any, **__: Any) -> Program:
        raise AssertionError("explain builds nothing")

    monkeypatch.setattr(OnnxRuntime, "build", never)
    told = intarsia.explain(Net().eval(), (X,), engines=[ORT], min_block_size=1)
    assert [s.engine for s in told.plan.segments] == [s.engine for s in plan.segments]
    assert "i0" in str(told), "the operator that would merge the most segments"


def test_require_full_compilation_turns_every_fallback_into_an_error_that_lists_them() -> None:
    with pytest.raises(PartitionError, match=r"aten\.i0\.default"):
        intarsia.compile(Net().eval(), (X,), engines=[ORT], require_full_compilation=True)


# Engines.


def test_engines_are_asked_in_the_order_given() -> None:
    for engines in ([ORT, "openvino"], ["openvino", ORT]):
        assert compiled(Plain(), engines=engines).plan.engines == (engines[0],)


def test_by_default_openvino_onnx_runtime_pytorch() -> None:
    assert [engine.name for engine in default_engines("cpu", [])] == ["openvino", ORT, "pytorch"]


@pytest.mark.slow
def test_a_machine_with_no_engine_still_compiles_and_notes_say_what_to_install() -> None:
    code = """
import sys
sys.modules["onnxruntime"] = sys.modules["openvino"] = None  # as if they were not installed
import torch, intarsia
model, x = torch.nn.Linear(4, 2).eval(), torch.ones(1, 4)
fast = intarsia.compile(model, (x,))
assert torch.equal(fast(x), model(x)) and fast.plan.engines == ("pytorch",), fast.plan
print(*fast.notes)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "intarsia[openvino]" in ran.stdout and "intarsia[onnxruntime]" in ran.stdout


def test_thread_counts_follow_torch() -> None:
    asked: dict[str, Callable[[Any], int]] = {
        ORT: lambda program: program._session.get_session_options().intra_op_num_threads,
        "openvino": lambda program: program._compiled.get_property("INFERENCE_NUM_THREADS"),
    }
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for engine, threads in asked.items():
                (step,) = compiled(Plain(), engines=[engine]).inlay.steps
                assert threads(step.program.program) == count, engine
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("engine", [ORT, "openvino"])
def test_weights_stay_where_pytorch_has_them(engine: str) -> None:
    """A write shows in what the program answers: nobody copied the table. A call would refuse."""
    model = nn.Embedding(50, 8)
    ids = torch.tensor([0, 7, 49])
    fast = compiled(model, ids, engines=[engine])
    assert fast.plan.engines == (engine,)
    model.weight.data[7] = 3.0
    torch.testing.assert_close(fast.results([ids])[0][1], torch.full((8,), 3.0))


@pytest.mark.slow
def test_a_kernel_that_packs_its_weights_makes_one_packed_copy() -> None:
    """The process takes the weight of a product once more; measured where nothing else runs."""
    code = """
import ctypes, gc, os, torch, intarsia
def resident():
    gc.collect(), ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def compiled(width, engine):
    model, x = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()), torch.randn(4, width)
    model.eval()(x)
    before = resident()
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1, verify=False)
    fast(x)
    assert fast.plan.engines == (engine,)
    return (resident() - before) / model[0].weight.nbytes
compiled(16, "pytorch")  # imports what all need; each engine then has a process of its own
for engine in ("onnxruntime", "openvino"):
    if not os.fork():
        compiled(16, engine)
        print(engine, compiled(4096, engine), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    copies = {engine: float(count) for engine, count in map(str.split, done.stdout.splitlines())}
    assert copies.keys() == {ORT, "openvino"} and all(0.5 < c < 1.5 for c in copies.values()), copies


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_inductor_pytorch_the_whole_module_in_one_cuda_graph() -> None:
    assert [engine.name for engine in default_engines("cuda")] == ["inductor", "pytorch"]
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval().cuda(), torch.randn(2, 8, device="cuda")
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert fast.plan.engines == ("inductor",)
    assert not any("CUDA graph" in note for note in fast.notes)  # nothing kept it from being recorded
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_same_cuts_become_the_stages_of_a_pipeline() -> None:
    model = Net().eval()
    plan = compiled(model).plan
    stages = split(model, (X,), cuts=plan)
    assert len(stages) == len(plan.segments)
    with torch.no_grad():
        torch.testing.assert_close(stages(X), model(X))

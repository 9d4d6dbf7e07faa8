"""MNN: exact layers, calls that are left to PyTorch, files, threads, and what its converter must not do."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import MNN, default_engines, with_unasked_engines
from intarsia.engines.mnn import engine as engine_module
from intarsia.errors import EngineError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

pytest.importorskip("MNN", reason="the engine under test; pip install 'intarsia[mnn]'")


class Images(nn.Module):
    """Convolutions of several kinds, norms, GELU, pools and attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 7, stride=2, padding=3)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.dense = nn.Conv2d(16, 32, 3, padding=1)
        self.layer_norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = nn.functional.gelu(x + self.depthwise(x))
        x = nn.functional.max_pool2d(self.dense(x), 2).flatten(2).transpose(1, 2)
        x = self.layer_norm(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return torch.softmax(self.head(x.mean(1)), -1)


X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Images().eval()


@pytest.fixture(scope="module")
def fast(model: nn.Module) -> intarsia.Compiled:
    compiled = intarsia.compile(model, (X,), engines=["mnn"])
    assert isinstance(compiled, intarsia.Compiled)
    return compiled


def test_the_whole_model_runs_on_it_and_is_exact(model: nn.Module, fast: intarsia.Compiled) -> None:
    assert fast.plan.engines == ("mnn",) and len(fast.plan) == 1
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fast(X.flip(0)), model(X.flip(0)), rtol=1e-5, atol=1e-6)


def test_results_are_of_their_own_memory(fast: intarsia.Compiled) -> None:
    first = fast(X)
    kept = first.clone()
    fast(-X)
    assert torch.equal(first, kept)


def test_many_threads_call_it_at_once(model: nn.Module, fast: intarsia.Compiled) -> None:
    inputs = [X * (i + 1) / 4 for i in range(8)]
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(fast, inputs))
        for answer, x in zip(answers, inputs, strict=True):
            torch.testing.assert_close(answer, model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e30])
def test_numbers_that_its_kernels_treat_otherwise_are_pytorchs(number: float) -> None:
    class Clamped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * 2) + torch.sigmoid(x)

    model, x = Clamped(), torch.tensor([[1.0, number, -2.0]])
    fast = intarsia.compile(model, (torch.ones(1, 3),), engines=["mnn"], min_block_size=1)
    with pytest.warns(UserWarning, match="PyTorch runs this call in place of an engine: .* holds NaN"):
        assert torch.equal(fast(x), model(x)) or fast(x).isnan().equal(model(x).isnan())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_answered_by_pytorch(model: nn.Module, fast: intarsia.Compiled) -> None:
    with torch.no_grad():
        expected = model(X)
    fast(X)
    pid = os.fork()
    if pid == 0:  # leaves at once, whatever happens: what pytest holds belongs to the parent
        alike = False
        try:
            torch.set_num_threads(1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                alike = torch.allclose(fast(X), expected, rtol=1e-4, atol=1e-5)
            alike = alike and any("forked process" in str(one.message) for one in caught)
        finally:
            os._exit(0 if alike else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_sizes_that_vary(model: nn.Module) -> None:
    batch = torch.export.Dim("batch", min=1, max=4)
    fast = intarsia.compile(model, (X,), engines=["mnn"], dynamic_shapes={"x": {0: batch}})
    assert "mnn" in fast.plan.engines
    with torch.no_grad():
        for rows in (1, 4, 2):
            x = torch.randn(rows, 3, 32, 32)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_file_holds_its_own_form(model: nn.Module, fast: intarsia.Compiled, tmp_path: Path) -> None:
    intarsia.save(fast, tmp_path / "images.intarsia")
    code = """
import sys, torch, intarsia
fast = intarsia.load(sys.argv[1])
assert fast.plan.engines == ("mnn",), fast.plan
torch.save(fast(torch.load(sys.argv[2])), sys.argv[3])
assert not any(name.startswith(("MNN.tools", "aliyun")) for name in sys.modules)
assert "intarsia.engines.mnn.layers" not in sys.modules, "a packed program is not converted again"
"""
    torch.save(X, tmp_path / "x.pt")
    paths = [str(tmp_path / name) for name in ("images.intarsia", "x.pt", "y.pt")]
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "", "MNN says nothing on the standard output of a user's program"
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "y.pt"), model(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes", "reason"),
    [
        ("MatMul", [(4,), (4,)], {}, "MatMul: an operand with one dimension is not handled"),
        ("ReduceL2", [(2, 3)], {}, "ReduceL2: it is not among the layers that were compared with PyTorch"),
        (
            "MaxPool",
            [(1, 2, 9, 9)],
            {"kernel_shape": [2, 2], "dilations": [2, 2]},
            "MaxPool: dilations=[2, 2] are ignored",
        ),
    ],
)
def test_what_is_wrong_or_ends_the_process_is_refused(
    op_type: str, shapes: list[tuple[int, ...]], attributes: dict[str, object], reason: str
) -> None:
    net = Network()
    with net_guard(net):
        inputs = [Tensor(f"i{n}", torch.float32, shape) for n, shape in enumerate(shapes)]
        F.op(op_type, *inputs, **attributes).mark_output("y")
    assert MNN().probe(net) == reason
    with pytest.raises(EngineError, match=re.escape(reason)):
        MNN().build(net)


def test_slices_that_run_backwards_are_refused() -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (4, 4))
        F.op("Slice", x, F.ints([-1]), F.ints([-9]), F.ints([0]), F.ints([-1])).mark_output("y")
    assert MNN().probe(net) == "Slice: steps=[-1] are not handled"


class Tokens(nn.Module):
    """Embeddings, a padding mask of either kind, comparisons and arithmetic of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = torch.clamp(torch.cumsum(mask, 1) * mask, max=31)
        x = self.words(ids) + self.places(places)
        keep = (mask != 0)[:, None, None, :]
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        heads = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=keep)
        x = self.norm(x + heads.transpose(1, 2).flatten(2))
        return torch.where((mask > 0)[..., None], x, 0.0), ids + places, ids >= 7


def _tokens(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return ids, mask


@pytest.fixture(scope="module")
def tokens() -> tuple[nn.Module, intarsia.Compiled]:
    model = Tokens().eval()
    fast = intarsia.compile(model, _tokens(2, 16), engines=["mnn"])
    assert isinstance(fast, intarsia.Compiled) and fast.plan.engines == ("mnn",) and len(fast.plan) == 1
    return model, fast


def test_token_ids_and_padding_masks(tokens: tuple[nn.Module, intarsia.Compiled]) -> None:
    model, fast = tokens
    with torch.no_grad():
        for one, other in zip(fast(*_tokens(2, 16)), model(*_tokens(2, 16)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        nothing = torch.zeros(2, 16, dtype=torch.long)  # attention to no place at all
        assert torch.allclose(fast(_tokens(2, 16)[0], nothing)[0], torch.zeros(2, 16, 16))


@pytest.mark.slow
def test_token_ids_and_masks_of_varying_length() -> None:
    model, names = Tokens().eval(), ("ids", "mask")
    sizes = {0: torch.export.Dim("rows", min=1, max=4), 1: torch.export.Dim("length", min=2, max=32)}
    fast = intarsia.compile(
        model, _tokens(2, 16), engines=["mnn"], dynamic_shapes=dict.fromkeys(names, sizes)
    )
    assert "mnn" in fast.plan.engines
    with torch.no_grad():
        for rows, length in ((1, 2), (4, 32), (3, 9), (2, 16)):
            expected = model(*_tokens(rows, length))
            for one, other in zip(fast(*_tokens(rows, length)), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("index", [50, -51, 2**31, -(2**40)])
def test_an_index_out_of_range_is_an_error_as_in_pytorch(
    tokens: tuple[nn.Module, intarsia.Compiled], index: int
) -> None:
    ids, mask = _tokens(2, 16)
    ids[1, 3] = index
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(IndexError):
            tokens[1](ids, mask)


@pytest.mark.parametrize("number", [2**24 + 1, 2**31 - 1, 2**31, -(2**31), 2**40, -(2**63)])
def test_integers_that_its_kernels_round_or_cut_are_pytorchs(number: int) -> None:
    class Sums(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                a + b,
                torch.maximum(a, b),
                a * 3,
                a < b,
                torch.where(a > b, a, b),
                (a // 7).float(),
                a != 0,
            )

    model = Sums()
    a, b = torch.arange(15) - 7, torch.arange(15).flip(0)
    fast = intarsia.compile(model, (a, b), engines=["mnn"], min_block_size=1)
    assert fast.plan.engines == ("mnn",)
    a[4] = number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in ((a, b), (b, a), (a, a)):
            for one, other in zip(fast(*given), model(*given), strict=True):
                assert torch.equal(one, other)


def test_both_zeros_are_equal() -> None:
    """MNN's Equal compares bits."""

    class Zeros(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x == 0, torch.logical_not(x), x.bool()

    x = torch.tensor([0.0, -0.0, 1.0, -2.0, 1e-30] * 4)
    fast = intarsia.compile(Zeros(), (x,), engines=["mnn"], min_block_size=1)
    assert fast.plan.engines == ("mnn",)
    for one, other in zip(fast(x), Zeros()(x), strict=True):
        assert torch.equal(one, other)


def test_comparisons_of_negative_floats() -> None:
    class Order(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return a < b, a <= b, a > b, a >= b, a == b, (a < b) ^ (a > 0)

    model, a = Order(), torch.linspace(-3, 3, 21)
    fast = intarsia.compile(model, (a, a.flip(0)), engines=["mnn"], min_block_size=1)
    assert fast.plan.engines == ("mnn",)
    for b in (a - 0.1, a + 0.1, a.flip(0), -a - 3):
        for one, other in zip(fast(a, b), model(a, b), strict=True):
            assert torch.equal(one, other)
    spread = (a[:, None], a.flip(0)[None])  # each is compared with many of the other
    fast = intarsia.compile(model, spread, engines=["mnn"], min_block_size=1)
    assert fast.plan.engines == ("mnn",)
    for one, other in zip(fast(*spread), model(*spread), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "shapes", [[(5, 10, 5), (5, 10, 5), (10, 5)], [(10, 5), (5, 10, 5), (10, 5)], [(5, 1, 5), (5,), (10, 1)]]
)
def test_choices_that_are_spread(shapes: list[tuple[int, ...]]) -> None:
    """MNN's Where reads an operand of fewer dimensions wrongly."""

    class Choice(nn.Module):
        def forward(self, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.where(c, a, b)

    model, (c, a, b) = Choice(), [torch.linspace(-9, 9, math.prod(s)).sin().reshape(s) for s in shapes]
    fast = intarsia.compile(model, (c > 0, a, b), engines=["mnn"], min_block_size=1)
    assert fast.plan.engines == ("mnn",) and torch.equal(fast(c > 0, a, b), model(c > 0, a, b))


def test_what_becomes_nan_on_the_way_is_pytorchs() -> None:
    """MNN's Relu makes 0 of NaN, so the answer would look alive."""

    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.log(x)) + torch.exp(x)

    model, x = Root(), torch.linspace(0.5, 4, 16)
    fast = intarsia.compile(model, (x,), engines=["mnn"], min_block_size=1)
    assert fast.plan.engines == ("mnn",)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.warns(UserWarning, match="PyTorch runs this call in place of an engine"):
        assert fast(-x).isnan().all()
    large = x.clone()
    large[3] = 100.0  # of whose exponential MNN makes 6e37
    assert torch.equal(fast(large), model(large))


def test_a_divisor_that_may_be_zero_and_float64_are_left_to_others() -> None:
    """A division of integers by zero would end the process."""

    class Quotient(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.div(a, b, rounding_mode="trunc")

    pair = (torch.tensor([7, 8]), torch.tensor([2, 1]))
    fast = intarsia.compile(Quotient(), pair, engines=["mnn"], min_block_size=1)
    assert "may be 0" in str(fast.plan)
    double = torch.ones(2, dtype=torch.float64)
    fast = intarsia.compile(nn.ReLU(), (double,), engines=["mnn"], min_block_size=1)
    assert "of DOUBLE, which MNN does not compute with" in str(fast.plan)


def test_a_converter_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia.engines.mnn import layers

    monkeypatch.setitem(layers.CONDITIONS, "Mish", lambda layer: None)
    net = Network()
    with net_guard(net):
        F.op("Mish", Tensor("x", torch.float32, (4, 4))).mark_output("y")
    with pytest.raises(EngineError, match="MNN's converter refuses network"):
        MNN().build(net)


def test_a_search_tries_it_where_convolutions_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "is_arm", lambda: True)
    vision = nn.Sequential(*[nn.Conv2d(4, 4, 3) for _ in range(8)])
    text = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    usable = default_engines()
    assert "mnn" not in [engine.name for engine in usable]
    assert "mnn" in [engine.name for engine in with_unasked_engines(usable, "cpu", vision)]
    assert "mnn" not in [engine.name for engine in with_unasked_engines(usable, "cpu", text)]
    assert "mnn" in [engine.name for engine in with_unasked_engines(usable, "cpu")], "a budget tries all"


def test_a_search_leaves_it_out_on_processors_where_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    vision = nn.Sequential(*[nn.Conv2d(4, 4, 3) for _ in range(8)])
    monkeypatch.setattr(engine_module, "is_arm", lambda: False)
    assert "mnn" not in [engine.name for engine in with_unasked_engines(default_engines(), "cpu", vision)]


def test_a_file_that_mnn_opens_refuses_integers_beyond_32_bits(tmp_path: Path) -> None:
    path = tmp_path / "sum.onnx"
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [3]) for name in ("x", "sum")]
    node = onnx.helper.make_node("Add", ["x", "x"], ["sum"])
    graph = onnx.helper.make_graph([node], "sum", ports[:1], ports[1:])
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    file = MNN().open(path)
    (result,) = file.run({"x": np.array([1, 2, 3])})
    assert result.tolist() == [2, 4, 6]
    with pytest.raises(EngineError, match="MNN reads integers in 32 bits, and x holds 1 to 4294967296"):
        file.run({"x": np.array([1, 2, 2**32])})

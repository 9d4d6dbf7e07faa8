"""Models on a CUDA device: compiled as they are, run as one CUDA graph, with any streams, threads, shapes."""

from __future__ import annotations

import operator
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import CuDNN, Engine, Inductor
from intarsia.engines.graph_rewrites import REWRITES, apply, apply_rewrites, paying, products
from intarsia.errors import InputError, StaleWeightsError
from intarsia.runtime import cuda_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def net() -> nn.Module:
    return Net().eval().cuda()


def image(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (2, 3, 16, 16)), device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_just_works_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    model, x = net().to(dtype), image().to(dtype)
    fast = intarsia.compile(model, (x,))
    assert fast.notes == ()
    for _ in range(3):
        x = image().to(dtype)
        assert fast(x).dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(fast(x), model(x), atol=tolerance, rtol=tolerance)


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=bias), nn.Conv2d(8, 8, 1, bias=bias)
        self.norm, self.pool = nn.BatchNorm2d(8), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(torch.relu(self.norm(self.second(torch.relu(self.first(x)))) + x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tf32", [True, False])
def test_fused_convolutions(
    dtype: torch.dtype, bias: bool, tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch lets convolutions round to TF32 unless it is told not to, and then they are exact."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    model = nn.Sequential(Block(bias), Block(bias)).eval().cuda().to(dtype)
    x = torch.randn(2, 8, 16, 16, device="cuda", dtype=dtype)
    fast = intarsia.compile(model, (x,), engines=[CuDNN(rewrites=tuple(REWRITES))])
    assert fast.plan.engines == ("cudnn",), str(fast.plan)
    assert fast.notes == ()
    y = torch.randn_like(x)
    tolerance = 5e-2 if dtype != torch.float32 else 5e-3 if tf32 else 1e-5
    torch.testing.assert_close(fast(y), model(y), atol=tolerance, rtol=tolerance)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 64, 8, 8)
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = (f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


_BOTH = ("patch_convolutions", "merged_products")


@pytest.mark.parametrize(
    "engine", [Inductor(rewrites=_BOTH), CuDNN(rewrites=_BOTH), Inductor(), CuDNN()], ids=str
)
def test_patches_and_projections(engine: Engine) -> None:
    model = Projections().eval().cuda().half()
    x = torch.randn(1, 3, 64, 64, device="cuda").half()
    fast = intarsia.compile(model, (x,), engines=[engine])
    assert fast.plan.engines == (engine.name,), str(fast.plan)
    torch.testing.assert_close(fast(x), model(x), atol=1e-2, rtol=1e-2)


def test_rewrites_are_measured_once_and_remembered_for_this_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    graph = torch.export.export(Projections().cuda().half(), (torch.randn(1, 3, 64, 64).cuda().half(),))
    module = graph.module()
    assert isinstance(module, torch.fx.GraphModule)
    timed: list[object] = []
    monkeypatch.setattr(apply, "_measured", lambda *given: timed.append(given) or ("merged_products",))
    lowered = lowered_piece(module)
    assert paying(lowered, _BOTH) == ("merged_products",)
    assert paying(lowered, _BOTH) == ("merged_products",)
    assert len(timed) == 1


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(256, 2048), nn.Linear(2048, 256), nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", [Inductor, CuDNN])
def test_split_products(engine: type[Inductor | CuDNN], dtype: torch.dtype) -> None:
    """A product of 64 x 256 results fills no GPU of today, whichever way it is measured best."""
    model = FeedForward().eval().cuda().to(dtype)
    x = torch.randn(1, 64, 256, device="cuda", dtype=dtype)
    count = products.measured_slices(64, 256, 2048, dtype, x.device)
    assert count in (1, 2, 4)
    module = lowered_piece(torch.export.export(model, (x,)).module())
    assert apply_rewrites(module, ["split_products"]) == {"split_products": int(count > 1)}
    fast = intarsia.compile(model, (x,), engines=[engine(rewrites=("split_products",))])
    assert fast.plan.engines == (engine.name,), str(fast.plan)
    torch.testing.assert_close(fast(x), model(x), atol=3e-2, rtol=3e-2)
    forced = lowered_piece(torch.export.export(model, (x,)).module())
    assert products.split_by(forced, lambda *given: 4) == 1
    forced.recompile()
    with torch.no_grad():
        torch.testing.assert_close(forced(x), model(x), atol=3e-2, rtol=3e-2)


def test_products_that_fill_the_gpu_are_left_whole() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    assert products.measured_slices(8192, 4096, 1024, torch.float16, cuda) == 1
    assert products.measured_slices(128, 768, 3072, torch.float32, cuda) == 1


def lowered_piece(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph as an engine is given it: weights by plain names."""
    names = {node.target: f"w{i}" for i, node in enumerate(module.graph.nodes) if node.op == "get_attr"}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(module)
            module.register_buffer(names[node.target], value.detach())
            node.target = names[node.target]
            node.meta["val"] = value
        if node.op == "call_module":  # a check of sizes, which lowering has done by then
            node.op, node.target, node.args = "call_function", torch.ops.aten.detach.default, node.args[:1]
    module.graph.eliminate_dead_code()
    return module


def fast_and_model(**options: object) -> tuple[intarsia.Compiled, nn.Module]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval().cuda()
    x = torch.randn(4, 8, device="cuda")
    return intarsia.compile(model, (x,), engines=["pytorch"], **options), model  # type: ignore[arg-type]


def test_results_are_the_callers_own() -> None:
    fast, model = fast_and_model()
    inputs = [torch.randn(4, 8, device="cuda") for _ in range(4)]
    answers = [fast(x) for x in inputs]
    for x, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer, model(x))


def test_static_results_are_overwritten_by_the_next_call() -> None:
    fast, model = fast_and_model(cuda_graphs="static")
    x, y = torch.randn(4, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    first = fast(x)
    torch.testing.assert_close(first, model(x))
    second = fast(y)
    assert first.data_ptr() == second.data_ptr()
    torch.testing.assert_close(second, model(y))


def test_one_launch_a_call() -> None:
    from torch.profiler import ProfilerActivity, profile

    fast, _ = fast_and_model()
    x = torch.randn(4, 8, device="cuda")
    fast(x)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        fast(x)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    assert any("cudaGraphLaunch" in name for name in names)


def test_calls_from_many_threads_and_streams() -> None:
    fast, model = fast_and_model()
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(50):
                x = torch.randn(4, 8, device="cuda", generator=generator)
                answer, expected = fast(x), model(x)
                torch.cuda.current_stream().synchronize()
                if not torch.allclose(answer, expected, atol=1e-5):
                    wrong.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_caller_may_record_a_graph_of_its_own() -> None:
    fast, model = fast_and_model()
    x = torch.randn(4, 8, device="cuda")
    fast(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    x.copy_(torch.randn(4, 8, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, model(x))


def test_each_shape_has_a_graph_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "SHAPES", 2)
    model = nn.Linear(8, 8).cuda()
    fast = intarsia.compile(
        model,
        (torch.randn(4, 8, device="cuda"),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=9)},),
        engines=["pytorch"],
    )
    graphs = fast.run
    assert isinstance(graphs, cuda_graphs.CudaGraphs)
    for rows in (4, 5, 4, 6, 5, 7, 4):
        x = torch.randn(rows, 8, device="cuda")
        torch.testing.assert_close(fast(x), model(x))
        assert len(graphs._recorded) <= 2


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) + torch.randn_like(x)


def test_random_numbers_are_those_of_eager_and_differ_from_call_to_call() -> None:
    x = torch.zeros(64, device="cuda")
    fast = intarsia.compile(Draws(), (x,))
    torch.manual_seed(3)
    answers = [fast(x) for _ in range(3)]
    torch.manual_seed(3)
    for answer in answers:
        assert torch.equal(answer, Draws()(x))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x * self.seen


def test_buffers_that_change() -> None:
    model = Counts().cuda()
    x = torch.ones(3, device="cuda")
    fast = intarsia.compile(model, (x,), engines=["pytorch"])
    model.seen.zero_()
    for call in range(1, 4):
        assert torch.equal(fast(x), x * call)
    assert int(model.seen) == 3


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)


class Crosses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.cpu() + 1).cuda() * 2


@pytest.mark.parametrize("model", [Reads(), Crosses()], ids=lambda model: type(model).__name__)
def test_what_cannot_be_recorded_runs_without_and_says_why(model: nn.Module) -> None:
    x = torch.tensor([0.0, 1.0, 2.0], device="cuda")
    fast = intarsia.compile(model, (x,), engines=["pytorch"])
    assert any("not run as a CUDA graph" in note for note in fast.notes), fast.notes
    assert torch.equal(fast(x), model(x))
    y = torch.tensor([3.0, 1.0, 0.0], device="cuda")
    assert torch.equal(fast(y), model(y))


def test_an_input_on_the_wrong_device_is_refused() -> None:
    fast, _ = fast_and_model()
    with pytest.raises(InputError, match="is on cpu; compiled for cuda:0"):
        fast(torch.randn(4, 8))


def test_a_returned_input_is_the_callers_tensor() -> None:
    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x + 1

    x = torch.ones(3, device="cuda")
    fast = intarsia.compile(Returns(), (x,), engines=["pytorch"])
    y = torch.zeros(3, device="cuda")
    same, more = fast(y)
    assert same.data_ptr() == y.data_ptr() and torch.equal(more, y + 1)


def test_out_of_memory_while_recording_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_record", fail)
    fast, model = fast_and_model()
    assert "not run as a CUDA graph: OutOfMemoryError: CUDA out of memory" in fast.notes
    x = torch.randn(4, 8, device="cuda")
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_the_second_device() -> None:
    model, x = net().to("cuda:1"), image().to("cuda:1")
    fast = intarsia.compile(model, (x,))
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    assert fast(x).device == x.device


def test_engines_are_measured_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_MEASURE", "1")
    model = nn.Sequential(*[Block(bias=False) for _ in range(3)]).eval().cuda().half()
    x = torch.randn(1, 8, 64, 64, device="cuda").half()
    fast = intarsia.compile(model, (x,))
    tried = str(fast.plan)
    assert "inductor" in tried and "cudnn" in tried and "pytorch" in tried, tried
    y = torch.randn_like(x)
    torch.testing.assert_close(fast(y), model(y), atol=5e-2, rtol=5e-2)


def test_weights_written_to_are_noticed_while_the_graph_runs() -> None:
    fast, model = fast_and_model()
    x = torch.randn(4, 8, device="cuda")
    fast(x)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(StaleWeightsError, match="weight of the model changed after compiling"):
        fast(x)
    fast.refit(model)
    torch.testing.assert_close(fast(x), model(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(self.words(ids))))


def test_tied_weights() -> None:
    model, ids = Tied().eval().cuda(), torch.randint(0, 32, (2, 5), device="cuda")
    fast = intarsia.compile(model, (ids,))
    torch.testing.assert_close(fast(ids), model(ids), atol=1e-4, rtol=1e-4)

"""ONNX Runtime's CUDA provider: all stays on the GPU, in the order of torch's stream, in one CUDA graph."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import OnnxRuntime, PyTorch
from intarsia.errors import EngineError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(OnnxRuntime(device="cuda").unavailable() is not None, reason="needs onnxruntime-gpu"),
]
ORT = OnnxRuntime(device="cuda")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return Net().eval().cuda().to(dtype)


def image(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, 16, 16, device="cuda")


def close(answer: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-3 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(answer, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_it_runs_in_one_cuda_graph(dtype: torch.dtype) -> None:
    model = net(dtype)
    fast = intarsia.compile(model, (image().to(dtype),), engines=[ORT])
    assert fast.plan.engines == ("onnxruntime",), str(fast.plan)
    assert fast.notes == ()
    for _ in range(5):
        x = image().to(dtype)
        close(fast(x), model(x))


def test_without_a_cuda_graph_calls_follow_torchs_stream() -> None:
    model = net()
    fast = intarsia.compile(model, (image(),), engines=[ORT], cuda_graphs=False)
    for _ in range(20):  # the input is made and the result read without anybody waiting in between
        x = image() * 3 + 1
        close(fast(x) * 2, model(x) * 2)


def test_neighbours_of_other_engines_in_one_graph() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
            self.two = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.special.i0(self.one(x)))

    model = Both().eval().cuda()
    x = torch.randn(4, 32, device="cuda")
    fast = intarsia.compile(model, (x,), engines=[ORT, PyTorch()])
    assert "onnxruntime" in fast.plan.engines and "pytorch" in fast.plan.engines, str(fast.plan)
    assert fast.notes == ()
    for _ in range(3):
        x = torch.randn(4, 32, device="cuda")
        close(fast(x), model(x))


def test_weights_stay_where_torch_has_them() -> None:
    model = nn.Sequential(nn.Linear(8192, 8192, bias=False)).cuda()  # 256 MiB
    x = torch.randn(1, 8192, device="cuda")
    model(x)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    fast = intarsia.compile(model, (x,), engines=[ORT], verify=False)
    fast(x)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 200 << 20
    close(fast(x), model(x))


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_follows_torch(allowed: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).eval().cuda()
    x = torch.randn(64, 1024, device="cuda")
    exact = model.double()(x.double()).float()
    model.float()
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        fast = intarsia.compile(model, (x,), engines=[ORT], require_full_compilation=True)
        error = (fast(x) - exact).abs().max()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert (error > 1e-4) == allowed


def test_threads_and_streams() -> None:
    model = net()
    fast = intarsia.compile(
        model,
        (image(),),
        engines=[ORT],
        require_full_compilation=True,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=16)},),
    )
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for turn in range(40):
                x = torch.randn(1 + (seed + turn) % 5, 3, 16, 16, device="cuda", generator=generator)
                answer, expected = fast(x), model(x)
                torch.cuda.current_stream().synchronize()
                if not torch.allclose(answer, expected, atol=1e-3):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_is_not_recorded_into_the_callers_graph() -> None:
    fast = intarsia.compile(net(), (image(),), engines=[ORT])
    x = image()
    fast(x)
    torch.cuda.synchronize()
    refused = pytest.raises(EngineError, match="cannot be recorded into another CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        fast(x)


def test_guards_are_read_back_and_told() -> None:
    model = nn.ConvTranspose2d(3, 4, 3).cuda()
    x = torch.randn(1, 3, 8, 8, device="cuda")
    fast = intarsia.compile(model, (x,), engines=[ORT])
    strict = intarsia.compile(model, (x,), engines=[ORT], require_full_compilation=True)
    assert any("reads back from the GPU whether" in note for note in fast.notes), fast.notes
    close(fast(x), model(x))
    x[0, 0, 0, 0] = torch.inf
    with pytest.warns(UserWarning, match="PyTorch runs this call"):
        answer = fast(x)
    torch.testing.assert_close(answer, model(x), equal_nan=True)
    with pytest.raises(EngineError, match=r"it holds .* to inf"):
        strict(x)


def test_patterns_are_measured_on_the_gpu_and_remembered_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu").eval().cuda()
    x = torch.randn(2, 16, 64, device="cuda")
    fast = intarsia.compile(model, (x,), engines=[ORT], rewrite=None)
    close(fast(x), model(x))
    kept = json.loads((tmp_path / "rewrite.json").read_text())
    assert any(torch.cuda.get_device_name() in key for key in kept), kept


@pytest.mark.skipif(
    OnnxRuntime(device="cuda", tensorrt=True).unavailable() is not None, reason="needs TensorRT's provider"
)
def test_tensorrts_provider() -> None:
    model = net()
    fast = intarsia.compile(model, (image(),), engines=[OnnxRuntime(device="cuda", tensorrt=True)])
    x = image()
    close(fast(x), model(x))

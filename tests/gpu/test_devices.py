"""Models whose tensors are in several places, GPUs that are hidden, and GPUs that are full."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class HalfOnTheCpu(nn.Module):
    """An embedding too large for the GPU, say, before layers that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.rest = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rest(self.table(ids).cuda())


def test_a_model_partly_on_the_cpu() -> None:
    model, ids = HalfOnTheCpu().eval(), torch.randint(0, 50, (2, 7))
    fast = intarsia.compile(model, (ids,))
    for _ in range(3):
        ids = torch.randint(0, 50, (2, 7))
        torch.testing.assert_close(fast(ids), model(ids), atol=1e-4, rtol=1e-4)
    assert any("not run as a CUDA graph" in note and "cpu" in note for note in fast.notes), fast.notes
    with pytest.raises(InputError, match="is on cuda:0; compiled for cpu"):
        fast(ids.cuda())


def test_a_hidden_gpu_is_no_gpu() -> None:
    program = """
import torch, intarsia
model = torch.nn.Linear(8, 8)
fast = intarsia.compile(model, (torch.ones(1, 8),))
assert torch.allclose(fast(torch.ones(1, 8)), model(torch.ones(1, 8)), atol=1e-5)
try:
    intarsia.compile(model, (torch.ones(1, 8),), engines=["cudnn"])
except intarsia.errors.EngineError as error:
    print(error)
"""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=hidden, capture_output=True, text=True, timeout=250, check=True
    )
    assert "there is no NVIDIA GPU" in done.stdout


def test_a_gpu_that_is_full_while_compiling() -> None:
    """Weights take the room that is allowed, so that no engine can copy them and no graph be recorded."""
    torch.cuda.empty_cache()
    layers = [nn.Linear(4096, 4096, bias=False) for _ in range(6)]  # 64 MiB each
    model = nn.Sequential(*layers).eval().cuda()
    x = torch.randn(8, 4096, device="cuda")
    expected = model(x)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (24 << 20)) / total)
    try:
        fast = intarsia.compile(model, (x,))
        answer = fast(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(answer, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_follows_torch(allowed: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).eval().cuda()
    x = torch.randn(64, 1024, device="cuda")
    exact = model.double()(x.double()).float()
    model.float()
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        fast = intarsia.compile(model, (x,))
        error = (fast(x) - exact).abs().max()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert (error > 1e-4) == allowed

"""Memory stays flat over many calls and compiles, and engines go when their module does."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia

pytestmark = pytest.mark.slow


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wide(width: int = 1024) -> nn.Module:
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 256)).eval()


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


@needs_proc
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
@pytest.mark.parametrize("calls", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_calls_keep_nothing(engine: str, calls: int) -> None:
    x = torch.randn(256, 256)
    fast = intarsia.compile(wide(64), (x,), engines=[engine], min_block_size=1)
    for _ in range(50):
        fast(x)
    gc.collect()
    before = resident()
    for _ in range(calls):
        fast(x)
    gc.collect()
    assert resident() - before < 8 << 20  # what is between the products, kept at each call, would be 19 MB


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_programs_go_with_their_module(engine: str) -> None:
    x = torch.randn(4, 256)
    fast = intarsia.compile(wide(), (x,), engines=[engine], min_block_size=1)
    program = weakref.ref(fast.inlay.steps[0].program.program)
    assert program() is not None
    del fast
    gc.collect()
    assert program() is None


@needs_proc
@pytest.mark.parametrize("compiles", [8, pytest.param(100, marks=pytest.mark.full)])
def test_compiles_keep_nothing(compiles: int) -> None:
    """In a process of its own: what other tests let go of is handed out again piece by piece."""
    code = f"""
import ctypes, gc, torch, intarsia
from tests.load.test_memory import resident, wide
x = torch.randn(4, 256)
def once():
    intarsia.compile(wide(4096), (x,), engines=["onnxruntime"], min_block_size=1)(x)
    gc.collect()  # modules that go all at once leave memory in pieces, which the system does not get back
def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    return resident()
for _ in range(4):
    once()
before = held()
for _ in range({compiles}):
    once()
print(held() - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The weights are 8 MB, packed once more: a module kept whole would cost 16 MB each.
    assert int(ran.stdout) < (32 << 20) + compiles * (1 << 20)


@needs_proc
def test_weights_in_few_bits_are_held_by_the_model_and_the_engine_alone() -> None:
    """Neither by the answers that were compared, nor by what a compile freed."""
    code = """
import gc, torch, intarsia
from torch import nn
from intarsia.memory import release_freed
from tests.layouts import Compressed
from tests.load.test_memory import resident
def once(layers):
    model = nn.Sequential(*(Compressed(1024, 1024, 128, 4) for _ in range(layers))).eval()
    size = sum(buffer.nbytes for buffer in model.buffers())
    gc.collect()
    release_freed()  # of what the layers were drawn from
    before = resident()
    fast = intarsia.compile(model, (torch.randn(4, 1024),), engines=["onnxruntime"], min_block_size=1)
    return (resident() - before) / size
once(4)
print(once(64))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Beyond the model, as times its size: the engine's copy is one. It was 1.4 to 1.5.
    assert 0 < float(ran.stdout) < 1.7


@needs_proc
def test_weights_that_a_file_holds_take_no_memory_once_the_engine_has_them(tmp_path: Path) -> None:
    code = f"""
import gc, torch, intarsia
from safetensors.torch import load_file, save_file
from torch import nn
from intarsia.memory import release_freed
from tests.layouts import Compressed
from tests.load.test_memory import resident
def once(layers):
    with torch.device("meta"):
        model = nn.Sequential(*(Compressed(1024, 1024, 128, 4) for _ in range(layers))).eval()
    packed = torch.randint(-2**31, 2**31, (layers, 1024, 128), dtype=torch.int32)
    tensors = {{f"{{i}}.weight_packed": part.clone() for i, part in enumerate(packed)}}
    tensors |= {{f"{{i}}.weight_scale": torch.rand(1024, 8) / 1024 for i in range(layers)}}
    save_file(tensors, "{tmp_path}/weights.safetensors")
    del packed, tensors
    gc.collect()
    release_freed()  # of what was drawn
    before = resident()
    model.load_state_dict(load_file("{tmp_path}/weights.safetensors"), assign=True)
    fast = intarsia.compile(model, (torch.randn(4, 1024),), engines=["onnxruntime"], min_block_size=1)
    return (resident() - before) / sum(buffer.nbytes for buffer in model.buffers())
once(4)
print(once(64))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The engine's copy is one; with the model's own it was 2.4.
    assert 0 < float(ran.stdout) < 1.9

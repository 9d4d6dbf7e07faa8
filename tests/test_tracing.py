"""Segments by name in torch's profiler and in `intarsia.profile`; nothing where nobody looks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.autograd import profiler as torch_profiler

import intarsia
from intarsia.pipeline import GPipe
from intarsia.tracing import is_traced


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.special.i0(self.first(x)))  # no engine has i0


NAMES = ["intarsia::0::onnxruntime", "intarsia::1::pytorch", "intarsia::2::onnxruntime"]


def _compiled(model: nn.Module, x: torch.Tensor) -> intarsia.Compiled:
    fast = intarsia.compile(model.eval(), (x,), engines="onnxruntime", min_block_size=1)
    assert isinstance(fast, intarsia.Compiled)
    return fast


def test_a_profile_has_segments_and_crossings(tmp_path: Path) -> None:
    model, x = Mixed(), torch.randn(3, 8)
    fast = _compiled(model, x)
    with intarsia.profile(fast) as p:
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
        _compiled(nn.Linear(8, 8), x)(x)  # another module
    fast(x)  # outside
    assert list(p.segments) == NAMES and all(len(seconds) == 2 for seconds in p.segments.values())
    assert list(p.crossings) == [f"{NAMES[0]} > 1::pytorch", f"{NAMES[1]} > 2::onnxruntime"]
    assert all(0 <= s < 1 for seconds in p.crossings.values() for s in seconds)
    assert "intarsia::1::pytorch" in str(p)
    p.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == NAMES * 2
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"MainThread"}


def test_torch_s_profiler_shows_segments_also_of_a_single_program() -> None:
    x = torch.randn(3, 8)
    for model, names in ((Mixed(), NAMES), (nn.Linear(8, 8), ["intarsia::0::onnxruntime"])):
        fast = _compiled(model, x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            fast(x)
        seen = [event.name for event in profiler.events() if event.name.startswith("intarsia::")]
        assert seen == names


def test_torch_tells_whether_a_profiler_runs() -> None:
    """The flag is private: this fails where torch no longer has it."""
    assert torch_profiler._is_profiler_enabled is False and not is_traced()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_traced()
    assert not is_traced()


def test_stages_of_a_pipeline_are_tracks(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    pipe = GPipe(layers, balance=[2, 1], devices=["cpu", "cpu"], chunks=2, checkpoint="always")
    places = [f"stage {j}, micro-batch {i}" for j in range(2) for i in range(2)]
    with intarsia.profile(pipe) as p:
        pipe(torch.randn(4, 8))
    assert sorted(p.segments) == places
    with intarsia.profile() as p:
        pipe(torch.randn(4, 8)).sum().backward()
    names = [f"{place}{kind}" for place in places for kind in ("", ", backward", ", recomputation")]
    assert sorted(p.segments) == names
    p.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sorted(e["args"]["name"] for e in events if e["ph"] == "M") == ["stage 0", "stage 1"]


RANK = """
import os
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch
from torch import nn
import intarsia
from intarsia.pipeline import split

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)
pipe = split(model, (x[:2],), stages=1).distributed("GPipe", 2, loss_fn=lambda y, t: (y - t).square().mean())
with intarsia.profile() as p:
    pipe.step(x, target=torch.zeros(4, 4))
print(*sorted(p.segments), sep="\\n")
torch.distributed.destroy_process_group()
"""


def test_a_rank_of_a_distributed_pipeline_has_a_track_for_each_stage() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kinds = ("", ", backward")
    assert done.stdout.split("\n")[:-1] == [
        f"stage 0, micro-batch {i}{kind}" for i in range(2) for kind in kinds
    ]

"""Two processes on the loopback device: every schedule gives the plain model's loss and gradients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.split import split

WORKER = Path(__file__).with_name("rank_worker.py")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def launch(*case: str, world: int = 2, limit: float = 150.0) -> list[tuple[int, str]]:
    """Run one case on `world` ranks; each rank's exit status and output. No process outlives the limit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SOURCE)])),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *case],
            env=common | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=limit)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def assert_passed(results: list[tuple[int, str]], words: str) -> None:
    for status, output in results:
        assert status == 0 and words in output, output


@pytest.mark.parametrize(
    ("name", "schedules"),
    [
        ("gpt2", []),
        ("unet", []),
        ("t5", ["1F1B", "ZeroBubble", "ZBV"]),
        ("llama", ["1F1B", "Interleaved1F1B"]),
    ],
)
def test_every_schedule_equals_the_plain_model(name, schedules):
    last = schedules[-1] if schedules else "DualPipeV"
    assert_passed(launch("same_as_plain", name, *schedules), f"{name} {last} ok")


@pytest.mark.parametrize("case", ["odd", "lengths", "refusals", "trains"])
def test_where_plain_use_goes_wrong(case):
    assert_passed(launch(case), "ok")


def test_a_killed_rank_ends_the_other_with_a_clear_error():
    (first, output), (second, _) = launch("killed")
    assert first == 0 and "killed ok" in output, output
    assert second == 9


def test_without_a_process_group():
    parts = split(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.randn(2, 2),), stages=2, by="memory"
    )
    with pytest.raises(PartitionError, match="run under torchrun"):
        parts.distributed()

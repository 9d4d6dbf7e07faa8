"""Two processes on the loopback device: every schedule gives the plain model's loss and gradients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest
import torch
from rank_worker import SCHEDULES
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.split import split

WORKER = Path(__file__).with_name("rank_worker.py")
FORK = Path(__file__).with_name("rank_fork.py")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def launch(
    *case: str, world: int = 2, limit: float = 250.0, worker: Path = WORKER, fork: bool = False
) -> list[tuple[int, str]]:
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
    with ExitStack() as stack:
        # Into files: a rank that waits until its pipe is read would keep the others waiting.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        run = _forked if fork else _started
        statuses = run([str(worker), *case], common, files, limit)
        found = []
        for status, file in zip(statuses, files, strict=True):
            file.seek(0)
            found.append((status, file.read()))
        return found


def _started(
    command: list[str], environment: dict[str, str], files: list[IO[str]], limit: float
) -> list[int]:
    """The exit statuses of ranks that are started one by one."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for r, file in enumerate(files)
    ]
    end = time.monotonic() + limit
    try:
        for rank in ranks:
            rank.wait(timeout=max(0.0, end - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks]


def _forked(command: list[str], environment: dict[str, str], files: list[IO[str]], limit: float) -> list[int]:
    """The exit statuses of ranks that are forked from one process (rank_fork.py)."""
    numbers = [file.fileno() for file in files]
    worker, *case = command
    job = subprocess.Popen(
        [sys.executable, str(FORK), str(len(files)), worker, *map(str, numbers), *case],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=numbers,
        start_new_session=True,
    )
    try:
        said, _ = job.communicate(timeout=limit)
    finally:
        if job.poll() is None:  # its ranks with it
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode == 0, said
    statuses: list[int] = json.loads(said.splitlines()[-1])
    return statuses


def assert_passed(results: list[tuple[int, str]], *words: str) -> None:
    for status, output in results:
        assert status == 0 and all(w in output for w in words), output


@pytest.fixture(scope="module")
def ranks() -> list[tuple[int, str]]:
    """What both processes printed: starting a pair costs more than a case, so one pair runs them all."""
    return launch(
        "same_as_plain:gpt2:GPipe:ZBV",
        "same_as_plain:unet:1F1B:DualPipeV",
        "same_as_plain:t5:ZeroBubble",
        "same_as_plain:llama:Interleaved1F1B",
        "odd",
        "lengths",
        "refusals",
        "trains",
        "rank_tree.decides:1F1B:ZBV",
        "rank_tree.structures",
        "rank_tree.refusals",
        "rank_tree.opt",
        "rank_tree.compiled",
    )


def test_every_schedule_equals_the_plain_model(ranks):
    words = [f"odd {schedule} ok" for schedule in SCHEDULES]
    assert_passed(ranks, *words, "gpt2 GPipe ok", "gpt2 ZBV ok", "unet DualPipeV ok")


def test_models_with_shared_tables_and_rotary_buffers(ranks):
    assert_passed(ranks, "t5 ZeroBubble ok", "llama Interleaved1F1B ok")


def test_where_plain_use_goes_wrong(ranks):
    assert_passed(ranks, "lengths ok", "refusals ok", "trains ok")


def test_models_that_no_graph_holds_cut_between_their_modules(ranks):
    assert_passed(ranks, "decides 1F1B ok", "decides ZBV ok", "structures ok", "tree refusals ok", "opt ok")


def test_compiled_stages(ranks):
    pytest.importorskip("onnxruntime")
    assert_passed(ranks, "compiled ok")


@pytest.mark.full
def test_more_schedules_of_these_models():
    cases = [f"same_as_plain:{name}" for name in ("gpt2", "unet", "t5", "llama")]
    words = [f"gpt2 {schedule} ok" for schedule in SCHEDULES]
    assert_passed(
        launch(*cases, "rank_tree.decides"), *words, "unet ZBV ok", "t5 DualPipeV ok", "llama ZBV ok"
    )


@pytest.mark.full
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

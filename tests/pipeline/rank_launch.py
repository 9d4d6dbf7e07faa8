"""Starts the ranks of a test on this machine and gives what each of them printed."""

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
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},  # a forked process cannot use a GPU
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

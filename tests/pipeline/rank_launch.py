"""Runs cases of the rank_*.py files on several ranks of this machine, and gives what each rank printed.

As a script, `rank_launch.py CASE...` is one rank; without a case, the process that ranks are forked from.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.hub
from torch import nn

from intarsia.pipeline.stages.trace import trace

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMAND = [sys.executable, __file__]


def launch(*cases: str, world: int = 2, fork: bool = True) -> list[tuple[int, str]]:
    """Run cases, `rank_file.function:argument:argument`, or a script; each rank's exit status and output.

    Most of what a small case takes is to import torch and to cut its models. All forked ranks come from one
    process, which does both once. They share the seed of `hash()`, which ranks of a real job do not:
    test_distributed.py starts its ranks one by one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as folder:
        # Into files: a rank that waits until its pipe is read would keep the others waiting.
        files = [Path(folder, str(rank)) for rank in range(world)]
        run = _forked if fork else _started
        statuses = run(cases, place, files)
        return [(status, file.read_text()) for status, file in zip(statuses, files, strict=True)]


def assert_passed(results: list[tuple[int, str]], *words: str) -> None:
    for status, output in results:
        assert status == 0 and all(w in output for w in words), output


def environment() -> dict[str, str]:
    """The variables of a process that is a rank or starts some."""
    paths = [os.environ.get("PYTHONPATH"), str(SOURCE)]
    return os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def _started(cases: Sequence[str], place: dict[str, str], files: list[Path]) -> list[int]:
    """The exit statuses of ranks that are started one by one."""
    ranks = []
    try:
        for rank, path in enumerate(files):
            own = environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as file:
                command = [*COMMAND, *cases]
                ranks.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
        return [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _forked(cases: Sequence[str], place: dict[str, str], files: list[Path]) -> list[int]:
    """The exit statuses of ranks that are forked."""
    parent = _parent()
    assert parent.stdin is not None and parent.stdout is not None
    answer = ""
    try:
        print(json.dumps([cases, place, list(map(str, files))]), file=parent.stdin, flush=True)
        answer = parent.stdout.readline()
        assert answer, "the process that forks ranks has ended; its error is above"
        return list(json.loads(answer))
    finally:
        if not answer:  # also where the test's time is over: its ranks end with it
            os.killpg(parent.pid, signal.SIGKILL)
            parent.communicate()
            _parent.cache_clear()


@functools.cache
def _parent() -> subprocess.Popen[str]:
    """The process that forks the ranks of all jobs of these tests. It ends when its input does."""
    own = environment() | {"CUDA_VISIBLE_DEVICES": ""}  # a forked process cannot use a GPU
    pipe = subprocess.PIPE
    return subprocess.Popen(COMMAND, env=own, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def serve() -> None:
    """Fork the ranks of the job in each line of the input, and print their exit statuses."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.hub.tqdm.monitor_interval = 0  # torch.fx makes a progress bar, and that a thread
    trace(nn.Linear(2, 2), (torch.ones(4, 2),))  # much more is imported when a model is first looked at
    for line in sys.stdin:
        cases, place, files = json.loads(line)
        os.environ.update(place)
        for module, _, arguments in (_case(case) for case in cases if case.startswith("rank_")):
            if hasattr(module, "prepare"):
                module.prepare(*arguments)
        assert threading.active_count() == 1, f"forked beside {threading.enumerate()}"
        ranks = []
        for rank, file in enumerate(files):
            pid = os.fork()
            if not pid:
                os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
                output = os.open(file, os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                return run(cases)
            ranks.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(statuses), file=answers, flush=True)
    return None


def run(cases: list[str]) -> None:
    """Run each case on this rank; one process group serves them all."""
    torch.set_num_threads(1)
    if not cases[0].startswith("rank_"):  # a script, which makes a group of its own
        sys.argv = cases[0].split(":")
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=250))
    for module, name, arguments in map(_case, cases):
        getattr(module, name)(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def _case(case: str):
    """The module, the name of the function, and the arguments."""
    name, *arguments = case.split(":")
    file, _, function = name.partition(".")
    return importlib.import_module(file), function, arguments


if __name__ == "__main__":
    run(sys.argv[1:]) if sys.argv[1:] else serve()

"""A server in a process of its own: told to stop under load it loses nothing; workers share one door."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.serve.harness import Slow, post, scores
from tests.serve.test_http import RAW, request, right
from torch import nn

import intarsia
from intarsia.serve import server
from intarsia.serve.__main__ import main

pytestmark = pytest.mark.slow

# What a container starts, and first which modules that has imported.
MAIN = """
import sys
from intarsia.serve import server
from intarsia.serve.__main__ import main
unwanted = ("intarsia.convert", "intarsia.rewrite", "intarsia.build", "typer", "transformers")
print("unwanted:", [name for name in unwanted if name in sys.modules], flush=True)
main()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model, fast = scores()
    path = tmp_path_factory.mktemp("archives") / "scores.intarsia"
    intarsia.save(fast, path)
    return model, path


@contextmanager
def process(
    path: Path, *options: str, code: str = MAIN, group: bool = False
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", code, str(path), "--port", "0", *options]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=group)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "unwanted: []\n"
        found = re.search(r":(\d+)$", running.stdout.readline().strip())
        assert found is not None, running.stderr and running.stderr.read()
        port = int(found[1])
        end = time.monotonic() + 120
        while True:
            try:
                connection = HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
                break
            except ConnectionError:  # workers are still loading
                assert time.monotonic() < end and running.poll() is None
                time.sleep(0.2)
            finally:
                connection.close()
        yield running, port
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


class Load:
    """Clients that ask and ask, each over one connection, until they are told to go away."""

    def __init__(self, port: int, clients: int, model: nn.Module) -> None:
        self._port, self._model = port, model
        self.seen: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        for turn in range(100_000):
            tensors = request(1, number * 100_000 + turn)
            try:
                answer = post(connection, safetensors.torch.save(tensors), RAW)
            except Exception as error:
                self.seen[type(error).__name__] += 1
                return
            good = answer.status == 200 and right(safetensors.torch.load(answer.body), self._model, tensors)
            self.seen["answered" if good else f"status {answer.status}"] += 1
            if answer.headers.get("connection") == "close":
                return

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def test_no_request_is_lost_when_told_to_stop(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    with process(path, "--wait-ms", "3") as (running, port):
        load = Load(port, 16, model)
        time.sleep(1.0)
        running.send_signal(signal.SIGTERM)
        load.join()
        assert running.wait(30) == 0
        assert load.seen["answered"] > 16
        assert set(load.seen) <= {"answered", "status 503"}, load.seen


@pytest.mark.full
def test_workers_share_a_door_and_add_up_their_figures(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    with process(path, "--workers", "2") as (running, port):
        load = Load(port, 8, model)
        time.sleep(3.0)
        counted = set()
        for _ in range(6):
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
            counted.add(float(re.findall(r'intarsia_requests_total{status="200"} (\S+)', text)[0]))
        running.send_signal(signal.SIGTERM)
        load.join()
        assert running.wait(60) == 0
        assert set(load.seen) <= {"answered", "status 503"}, load.seen
        assert max(counted) <= load.seen["answered"] and min(counted) > load.seen["answered"] / 4


@pytest.mark.full
def test_a_worker_that_dies_ends_the_server(saved: tuple[nn.Module, Path]) -> None:
    with process(saved[1], "--workers", "2") as (running, _):
        command = ["pgrep", "-P", str(running.pid), "-f", "spawn_main"]
        children = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert running.wait(60) == 1
        assert running.stderr is not None and "a worker ended unexpectedly" in running.stderr.read()


def test_a_file_that_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.intarsia").write_bytes(b"PK nothing")
    for words, said in (
        ([str(tmp_path / "x.intarsia")], "cannot be loaded"),
        ([str(tmp_path / "none.intarsia")], "No such file"),
        (["x", "--queue", "0"], "at least 1"),
        (["x", "--import", "no_such_module"], "no_such_module"),
    ):
        monkeypatch.setattr(sys, "argv", ["serve", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 1
        assert said in capsys.readouterr().err


def test_a_start_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "load_interface", interrupted)
    monkeypatch.setattr(sys, "argv", ["serve", "x.intarsia"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.full
def test_interrupted_workers_answer_their_requests(tmp_path: Path) -> None:
    """One worker has a request, the other none. A terminal sends SIGINT to all of them."""
    x = torch.eye(1500)
    intarsia.save(intarsia.compile(Slow().eval(), (x,), engines="pytorch"), tmp_path / "slow.intarsia")
    with process(tmp_path / "slow.intarsia", "--workers", "2", group=True) as (running, port):
        statuses: list[int] = []

        def ask() -> None:
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            statuses.append(post(connection, safetensors.torch.save({"x": x}), RAW).status)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(1.0)
        os.killpg(running.pid, signal.SIGINT)
        asking.join()
        assert running.wait(60) == 0 and statuses == [200]
        assert running.stderr is not None and running.stderr.read() == ""


@pytest.mark.full
def test_a_call_that_never_ends_does_not_keep_the_process(saved: tuple[nn.Module, Path]) -> None:
    hangs = MAIN.replace("main()\n", "from intarsia.serve.interface import Interface\n") + (
        "import time\nserver._warm = lambda interface: setattr(\n"
        "    Interface, 'run', lambda *_: time.sleep(1000))\nmain()\n"
    )
    with process(saved[1], "--stop-s", "1", "--linger-s", "0", code=hangs) as (running, port):
        asking = threading.Thread(target=Load, args=(port, 1, saved[0]))
        asking.start()
        time.sleep(1.0)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 1
        asking.join()


@pytest.mark.full
def test_memory_stays_flat_under_load(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved

    def megabytes(pid: int) -> float:
        (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
        return int(line.split()[1]) / 1024

    with process(path) as (running, port):
        seen = []
        load = Load(port, 8, model)
        for _ in range(10):
            time.sleep(2.0)
            seen.append(megabytes(running.pid))
        running.send_signal(signal.SIGTERM)
        load.join()
        assert running.wait(30) == 0
    assert seen[-1] - seen[2] < 15, seen
    assert load.seen["answered"] > 500

"""What a compile tells while it runs: stages and refusals in the log, a line on a terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import CaptureError
from intarsia.logs import LOG, _seconds_each, counted, tell, working


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def log() -> list[str]:
    handler, level = _Kept(), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    yield handler.lines
    LOG.removeHandler(handler)
    LOG.setLevel(level)


def test_stages_and_refusals_are_logged(log: list[str]) -> None:
    class Bessel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(torch.tanh(x))

    intarsia.compile(Bessel(), (torch.ones(2, 3),), engines="onnxruntime", min_block_size=1)
    stages = [line.split(":")[0] for line in log if line.startswith("INFO")]
    assert stages[:2] == ["INFO running the model", "INFO exporting and lowering"]
    assert stages[-1].startswith("INFO compiled in") and "INFO building the segments" in stages
    assert "DEBUG onnxruntime does not take i0 (aten.i0.default): no converter" in log


def test_torch_s_own_logs_stay_out_of_stderr(log: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="cannot be exported"):
        intarsia.compile(Branches(), (torch.ones(2, 5),), fallback="error")
    assert capfd.readouterr().err == ""
    assert any("torch wrote while it exported" in line and "def forward" in line for line in log)


SCRIPT = """
import torch, intarsia
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
intarsia.compile(model, (torch.ones(2, 64),), engines="onnxruntime", min_block_size=1)
"""


def test_nothing_is_written_to_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_onnx_runtime_sends_no_telemetry() -> None:
    """Its telemetry wants a file in the home directory, and warns where it cannot write one."""
    environment = {**os.environ, "HOME": "/proc/none", "INTARSIA_CACHE_GB": "0"}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "telemetry" not in done.stderr, done.stderr


def test_a_terminal_shows_the_stage(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    # An empty cache: the time that the stages of another compile took says nothing about this one.
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "INTARSIA_CACHE": str(tmp_path)}
    script = SCRIPT.replace("torch.nn.GELU()", "*[torch.nn.GELU() for _ in range(100)]")
    with subprocess.Popen([sys.executable, "-c", script], stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not read:
                break
            shown += read
    os.close(ours)
    assert process.returncode == 0
    assert b"exporting and lowering" in shown and b"intarsia (0 s, about " in shown


def test_a_line_counts_and_says_how_long_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with working("timing 3 peers", 20.5):
        assert list(counted("ab", 2, "comparing")) == ["a", "b"]
        tell("building onnxruntime; best so far openvino, 12.30 ms", 9.9)
    written = file.getvalue()
    assert "intarsia (0 s, about 20 s left): timing 3 peers" in written
    assert "intarsia (0 s): comparing" in written
    assert "intarsia (0 s, about 10 s left): building onnxruntime; best so far openvino, 12.30 ms" in written


def test_what_is_printed_to_a_pipe_meanwhile_reaches_it() -> None:
    script = "from intarsia.logs import working\nwith working('computing', 1.0):\n    print('a result')\n"
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=theirs, check=False)
    os.close(theirs)
    os.close(ours)
    assert done.stdout == b"a result\n"


def test_a_first_compile_has_an_estimate_and_the_next_one_that_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    first = _seconds_each()
    assert first["exporting and lowering"] > 0
    _seconds_each({"exporting and lowering": 0.5})
    assert _seconds_each() == first | {"exporting and lowering": 0.5}

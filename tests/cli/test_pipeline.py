"""The command line draws schedules and runs them under torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from intarsia.cli.main import main
from intarsia.cli.pipeline import app
from intarsia.pipeline.plan.simulate import ascii_gantt
from intarsia.pipeline.schedules import schedule

SOURCE = Path(__file__).resolve().parents[2] / "src"


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SOURCE)]))
    here = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    here.pop("RANK", None)
    return here


def test_draw(tmp_path):
    result = CliRunner().invoke(
        app, ["draw", "--schedule", "ZeroBubble", "--ranks", "2", "--microbatches", "3"]
    )
    assert result.exit_code == 0
    assert result.output.strip() == ascii_gantt(schedule("ZeroBubble", 2, 3))
    path = tmp_path / "a.svg"
    assert CliRunner().invoke(app, ["draw", "--picture", str(path)]).exit_code == 0
    assert "<svg" in path.read_text(encoding="utf-8")


def test_json():
    words = ["draw", "--schedule", "GPipe", "--ranks", "2", "--microbatches", "1", "--json"]
    assert json.loads(CliRunner().invoke(app, words).output)["ranks"] == [["0F0", "0B0"], ["1F0", "1B0"]]
    listed = json.loads(CliRunner().invoke(app, ["schedules", "--json"]).output)
    assert listed["ZeroBubble"] == {"stages_per_rank": 1, "splits_backward": True, "is_simulated": True}


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["draw", "--ranks", "0"], "--ranks=0"),
        (["draw", "--microbatches", "-1"], "--microbatches=-1"),
        (["run", "--ranks", "0"], "--ranks=0"),
        (["run", "--steps", "0"], "--steps=0"),
        (["run", "--timeout", "0"], "--timeout=0"),
        (["run", "--microbatches", "0"], "--microbatches=0"),
        (["run", "--schedule", "Fancy"], "Fancy"),
        (["run", "--ranks", "4", "--microbatches", "3"], "microbatches=3 is less than 4"),
        (["run", "nosuch"], "'nosuch' is not a model type of Hugging Face"),
        (["run", "nosuch.py:make"], "nosuch.py"),
    ],
)
def test_a_bad_value_is_one_sentence(options, value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["intarsia", "pipeline", *options])
    with pytest.raises(SystemExit) as ended:  # any other exception would be a traceback
        main()
    told = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert ended.value.code not in (0, None) and value in told, told
    assert "Traceback" not in told


def test_run_on_one_rank(monkeypatch):
    """Both stages in this process; test_pipeline_train.py starts two."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    for key, value in (alone | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(key, value)
    done = CliRunner().invoke(app, ["run", "--schedule", "ZBV", "--steps", "2"])
    assert done.exit_code == 0, done.output
    assert "gradients equal the plain model's" in done.output
    assert "tied: tokens.weight is held by stages 0, 1" in done.output


@pytest.mark.full
@pytest.mark.parametrize("name", ["1F1B"])
def test_run_under_torchrun(name):
    command = [sys.executable, "-m", "intarsia.cli.pipeline", "run", "--schedule", name, "--steps", "2"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gradients equal the plain model's") == 2
    assert "tied: tokens.weight is held by stages 0, 1" in done.stdout
    assert "loss" in done.stdout


@pytest.mark.slow
def test_what_ranks_refuse_is_one_sentence(tmp_path):
    """Every rank finds it out; it is said once, without a traceback and without torchrun's report."""
    (tmp_path / "job.py").write_text("def make():\n    return 7\n", encoding="utf-8")
    command = [sys.executable, "-m", "intarsia", "pipeline", "run", "job.py:make", "--steps", "1"]
    ran = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 2 and ran.stdout == ""
    (said,) = [line for line in ran.stderr.splitlines() if "Warning" not in line and line.strip()]
    assert said == "job.py:make must return (model, data, loss) or a model, not int"

"""The root command line: each command prints what it promises, and what is wrong in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from intarsia.cli import zoo
from intarsia.cli.main import app, main
from intarsia.errors import IntarsiaError


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_engines_says_which_are_usable() -> None:
    printed = run("engines")
    for name in ("openvino", "onnxruntime", "pytorch"):
        assert name in printed
    assert "yes" in printed


def test_demo_lists_the_architectures() -> None:
    assert run("demo", "--list").split() == zoo.names()


def test_demo_compares_every_engine_with_eager() -> None:
    printed = run("demo", "resnet50", "--no-full")
    assert "Plan by" in printed and "PyTorch eager" in printed and "error" in printed


OWN_MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), (torch.randn(2, 4),)

def wrong():
    return torch.nn.Linear(4, 8)
"""


def test_bench_times_a_model_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "own_model.py"
    file.write_text(OWN_MODEL)
    printed = run("bench", f"{file}:make", "--no-torch-compile", "--seconds", "0.2")
    assert "Sequential" in printed and "PyTorch eager" in printed and "intarsia, measured" in printed
    failed = CliRunner().invoke(app, ["bench", f"{file}:wrong"])
    assert isinstance(failed.exception, IntarsiaError)
    assert "must return (model, args) or (model, args, kwargs), not Linear" in str(failed.exception)


def test_help_imports_neither_torch_nor_an_engine() -> None:
    script = (
        "import sys\nfrom intarsia.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'onnx', 'numpy', 'onnxruntime', 'openvino'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "explain" in done.stdout and "pipeline" in done.stdout


def test_explain_prints_a_plan_or_json() -> None:
    assert "Plan by" in run("explain", "bert")
    assert json.loads(run("explain", "bert", "--json"))["segments"]


def test_pipeline_is_a_command_of_the_root() -> None:
    assert "rank 0" in run("pipeline", "draw", "--ranks", "2", "--microbatches", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "no-such-model"], "no-such-model"),
        (["demo", "no-such-model"], "no-such-model"),
        (["pipeline", "draw", "--ranks", "0"], "0"),
        (["pipeline", "draw", "--picture", "/no/such/folder/a.svg"], "/no/such/folder"),
        (["pipeline", "draw", "--schedule", "Fancy"], "Fancy"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["intarsia", *words])
    with pytest.raises(SystemExit) as ended:  # any other exception would be a traceback
        main()
    told = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert ended.value.code not in (0, None)
    assert said in told and "Traceback" not in told


def test_a_mistake_ends_the_process_with_one_sentence() -> None:
    command = [sys.executable, "-c", "from intarsia.cli.main import main; main()", "explain", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr

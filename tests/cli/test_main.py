"""Every command through the entry point: it prints what it promises, as text and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from tests.cli.command import Command

import intarsia as package
from intarsia.cli import zoo


def test_help_imports_neither_torch_nor_an_engine() -> None:
    script = (
        "import sys\nfrom intarsia.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'onnx', 'numpy', 'onnxruntime', 'openvino'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "explain" in done.stdout and "pipeline" in done.stdout


def test_naming_compile_does_not_import_the_compiler() -> None:
    script = (
        "import sys, intarsia\nintarsia.compile\n"
        "assert not {'torch', 'sympy', 'onnx', 'onnx_ir', 'rich'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_process_ends_with_one_sentence_and_a_code() -> None:
    command = [sys.executable, "-m", "intarsia", "explain", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no-such-model" in done.stderr and "Traceback" not in done.stderr


def _run(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m intarsia"
    environment = {**os.environ, **variables}
    shell = ["bash", "-o", "pipefail", "-c", command.replace("intarsia", program, 1)]
    return subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    done = _run("intarsia pipeline draw | true")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_without_utf8_and_without_colours() -> None:
    done = _run("intarsia explain Größe", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "there is no model 'Gr" in done.stderr, done
    assert "\x1b" not in _run("intarsia explian", NO_COLOR="1", FORCE_COLOR="1").stderr


def test_version(intarsia: Command) -> None:
    assert intarsia.good("--version").strip() == package.__version__


def _completed(line: str, cwd: Path) -> list[str]:
    """What a shell is told to complete a line with, by the entry point; torch must not be imported for it."""
    script = (
        "import sys\nsys.argv = ['intarsia']\nfrom intarsia.cli.main import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_INTARSIA_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_models_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "models").mkdir()
    assert _completed("intarsia exp", tmp_path) == ["explain", "export"]
    assert _completed("intarsia explain be", tmp_path) == ["bert"]
    assert _completed("intarsia demo dist", tmp_path) == ["distilbert"]
    assert sorted(_completed("intarsia compile ", tmp_path)) == sorted([*zoo.names(), "models/", "own.py"])


def test_debug_shows_the_traceback(intarsia: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--debug", "explain", "no-such-model"], ["explain", "no-such-model", "--debug"]):
        with pytest.raises(package.errors.InputError, match="no-such-model"):
            intarsia(*words)


def test_engines(intarsia: Command) -> None:
    printed = intarsia.good("engines")
    assert "openvino" in printed and "yes" in printed
    assert json.loads(intarsia.good("engines", "--json"))["pytorch"] == {"usable": True, "reason": None}


def test_env(intarsia: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_MEASURE", "0")
    assert torch.__version__ in intarsia.good("env")
    facts = json.loads(intarsia.good("env", "--json"))
    assert facts["torch"] == torch.__version__ and "pytorch" in facts["engines"]
    assert facts["settings"]["INTARSIA_MEASURE"] == "0"


def test_cache(intarsia: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    from intarsia.cache.store import JsonStore

    (tmp_path / "mine.json").write_text("{}")  # a file of the user's
    JsonStore(tmp_path / "costs.json").update({"a": 1})
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "0123").write_bytes(b"module")
    assert intarsia.good("cache", "where").strip() == str(tmp_path)
    listed = {entry["file"]: entry["bytes"] for entry in json.loads(intarsia.good("cache", "ls", "--json"))}
    assert listed["built/0123"] == 6 and "costs.json" in listed and "mine.json" not in listed
    assert "built/0123" in intarsia.good("cache", "ls")
    assert "deleted 3 files" in intarsia.good("cache", "clear")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine.json"]


def test_demo(intarsia: Command) -> None:
    assert intarsia.good("demo", "--list").split() == zoo.names()
    printed = intarsia.good("demo", "resnet50", "--no-full")
    assert "Plan by" in printed and "PyTorch eager" in printed and "error" in printed


def test_bench(intarsia: Command, models: str) -> None:
    words = ("bench", f"{models}:make", "--no-torch-compile", "--seconds", 0.2)
    printed = intarsia.good(*words)
    assert "Sequential" in printed and "PyTorch eager" in printed and "intarsia, measured" in printed
    peers = json.loads(intarsia.good(*words, "--engines", "onnxruntime", "--json"))["peers"]
    assert list(peers) == ["PyTorch eager", "intarsia, onnxruntime alone", "intarsia, measured"]
    assert all(peer["error"] < 1e-5 and peer["median_ms"] > 0 for peer in peers.values())


def test_bench_with_padding(intarsia: Command) -> None:
    words = ("bench", "gpt2", "--no-full", "--padded", 3, "--engines", "onnxruntime", "--no-torch-compile")
    peers = json.loads(intarsia.good(*words, "--seconds", 0.2, "--json"))["peers"]
    assert all(peer["error"] < 1e-5 for peer in peers.values())
    refused = intarsia("bench", "resnet50", "--no-full", "--padded", 3)
    assert refused.code and "does not take tokens with an attention_mask" in refused.err


@pytest.mark.slow
def test_bench_with_peers_of_an_exported_file_and_lengths_that_vary(intarsia: Command) -> None:
    words = ("bench", "bert", "--no-full", "--engines", "onnxruntime", "--no-torch-compile", "--seconds", 0.2)
    printed = intarsia.good(*words, "--padded", 3, "--varying", "--exported", "--json")
    assert json.loads(printed)["measure"] == "latency of 3 lengths together"
    peers = json.loads(printed)["peers"]
    assert {"torch.onnx + onnxruntime", "torch.onnx + openvino"} <= set(peers)
    assert all(peer["error"] < 1e-4 for name, peer in peers.items() if "mnn" not in name), peers
    refused = intarsia(*words, "--varying")
    assert refused.code and "--varying needs --padded ROWS" in refused.err


@pytest.mark.slow
def test_bench_of_throughput(intarsia: Command, models: str) -> None:
    words = ("bench", f"{models}:make", "--no-torch-compile", "--seconds", 0.2, "--engines", "onnxruntime")
    printed = json.loads(intarsia.good(*words, "--batch", 4, "--objective", "throughput", "--json"))
    assert printed["measure"].startswith("time per call of ")
    peers = printed["peers"]
    assert "intarsia, measured" in peers and all(peer["error"] < 1e-5 for peer in peers.values())
    refused = intarsia(*words, "--objective", "speed")
    assert refused.code and "none of latency, throughput" in refused.err


def test_explain(intarsia: Command, models: str) -> None:
    assert "Plan by" in intarsia.good("explain", f"{models}:make")
    words = ("explain", f"{models}:make", "--engines", "onnxruntime", "-O", "min_block_size=1", "--json")
    assert [segment["engine"] for segment in json.loads(intarsia.good(*words))["segments"]] == ["onnxruntime"]
    intarsia.good("explain", f"{models}:make", "--html", "report.html")
    assert "<html" in Path("report.html").read_text().lower()


def test_compile_then_explain_run_and_bench_the_file(intarsia: Command, models: str) -> None:
    words = ("compile", f"{models}:make", "--engines", "onnxruntime", "-O", "min_block_size=1")
    printed = intarsia.good(*words, "-o", "one.intarsia")
    assert "Plan by" in printed and "wrote one.intarsia" in printed
    told = json.loads(intarsia.good(*words, "-o", "two.intarsia", "--json"))
    assert told["file"] == "two.intarsia" and told["plan"]["segments"][0]["engine"] == "onnxruntime"
    assert told["bytes"] == Path("two.intarsia").stat().st_size
    assert "onnxruntime" in intarsia.good("explain", "one.intarsia")
    assert "float32 (2, 3)" in intarsia.good("run", "one.intarsia")
    ran = json.loads(intarsia.good("run", "one.intarsia", "--json", "--rounds", 3))
    assert list(ran["inputs"]) == ["input"] and ran["times"]["median_ms"] > 0
    printed = intarsia.good("bench", "one.intarsia", "--no-torch-compile", "--seconds", 0.2)
    assert "PyTorch eager" in printed


def test_a_budget_measures(intarsia: Command, models: str) -> None:
    words = ("compile", f"{models}:make", "-o", "a.intarsia", "--budget", 0.5)
    assert "Plan by measurement" in intarsia.good(*words)


BACKENDS = """
import torch

def scaled(model):
    return lambda *args: model(*args) * 1.5

def eager(model):
    return torch.compile(model, backend="eager")
"""


def test_check(intarsia: Command, models: str) -> None:
    Path("backends.py").write_text(BACKENDS)
    name = f"{models}:make"
    assert "computes what the model does, to rounding" in intarsia.good("check", name)
    words = ("--against", "backends.py:eager", "--no-edges", "--draws", 1)
    report = json.loads(intarsia.good("check", name, *words, "--json"))
    assert report["equal"] and [c["inputs"] for c in report["comparisons"]] == [
        "the example",
        "drawn inputs 0",
    ]
    outcome = intarsia("check", name, "--against", "backends.py:scaled")
    assert outcome.code == 1 and "differs from the model" in outcome.out


def test_check_and_diff_of_a_file(intarsia: Command, models: str) -> None:
    words = ("--engines", "onnxruntime", "-O", "min_block_size=1")
    intarsia.good("compile", f"{models}:make", *words, "-o", "a.intarsia")
    assert "a.intarsia computes" in intarsia.good("check", f"{models}:make", "--against", "a.intarsia")
    assert "computes what the model does" in intarsia.good("check", "a.intarsia")
    (segment,) = json.loads(intarsia.good("diff", "a.intarsia", "--json"))["segments"]
    assert segment["engine"] == "onnxruntime" and 0 <= segment["own"] < 1e-5
    assert "own error" in intarsia.good("diff", f"{models}:make", *words)


def test_diff_of_short_arithmetic_is_a_difference(intarsia: Command, models: str) -> None:
    short = ("--engines", "onnxruntime-int8", "-O", "tolerance=0.1", "-O", "min_block_size=1")
    outcome = intarsia("diff", f"{models}:make", *short)
    assert outcome.code in (0, 1), outcome.err
    assert ("differs:" in outcome.out) == (outcome.code == 1)


def test_export(intarsia: Command, models: str) -> None:
    words = ("export", f"{models}:make", "-O", "min_block_size=1", "--to")
    assert "wrote make.onnx, a plain file" in intarsia.good(*words, "onnx")
    told = json.loads(intarsia.good(*words, "openvino", "-o", "net.xml", "--json"))
    assert told == {"path": "net.xml", "is_folder": False, "settings": {"INFERENCE_PRECISION_HINT": "f32"}}
    intarsia.good(*words, "pt2", "-o", "net.pt2")
    for file in ("make.onnx", "net.xml", "net.pt2"):
        intarsia.good("check", f"{models}:make", "--against", file, "--no-edges")


def test_sizes_that_vary(intarsia: Command, models: str) -> None:
    name, few = f"{models}:make", ("--no-edges", "--draws", 0, "--json")
    words = (name, "--range", "input.0=1:32", "--engines", "onnxruntime", "-O", "min_block_size=1")
    places = ["the example", "the least sizes", "the largest sizes"]
    report = json.loads(intarsia.good("check", *words, *few))
    assert [comparison["inputs"] for comparison in report["comparisons"]] == places
    intarsia.good("compile", *words, "-o", "a.intarsia")
    assert package.load("a.intarsia")(torch.randn(32, 4)).shape == (32, 3)
    assert json.loads(intarsia.good("explain", *words, "--json"))["segments"]
    # A function may give an `Input` instead.
    report = json.loads(intarsia.good("check", f"{models}:varies", *few))
    assert [comparison["inputs"] for comparison in report["comparisons"]] == places


def test_serve(intarsia: Command, models: str) -> None:
    intarsia.good("compile", f"{models}:make", "-o", "a.intarsia", "--engines", "pytorch")
    command = [sys.executable, "-m", "intarsia", "serve", "a.intarsia", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            about = json.loads(server.stdout.readline())
            with urllib.request.urlopen(about["address"], timeout=60) as response:
                assert json.load(response)["outputs"] == about["outputs"] == ["output"]
        finally:
            server.terminate()


def test_split(intarsia: Command, models: str) -> None:
    assert "stage 1" in intarsia.good("split", f"{models}:make")
    told = json.loads(intarsia.good("split", f"{models}:make", "--by", "memory", "--json"))
    assert len(told["stages"]) == 2 and told["by"] == "memory"


def test_pipeline_is_a_command_of_the_root(intarsia: Command) -> None:
    assert "rank 0" in intarsia.good("pipeline", "draw", "--ranks", 2, "--microbatches", 2)


def test_tune(intarsia: Command, models: str) -> None:
    script = Path("script.py")
    script.write_text("from models import make\nmodel, args = make()\nfor _ in range(4):\n    model(*args)\n")
    outcome = intarsia("tune", "--always", "--engines", "onnxruntime", "--json", script)
    assert outcome.code == 0
    assert json.loads(outcome.err)["modules"]

"""The guide's example runs, the Dockerfile starts what there is, and a file runs from the command line."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.archive.models import MODELS
from tests.serve.harness import running, scores
from tests.serve.test_http import request, right
from torch import nn
from typer.testing import CliRunner

import intarsia
from intarsia.cli.main import app
from intarsia.cli.running import serve
from intarsia.errors import InputError
from intarsia.serve import Options

ROOT = Path(__file__).parents[2]


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    makes, asks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/deploying.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(makes, names)
    exec(asks, names)
    loaded = intarsia.load("model.intarsia")
    x = torch.randn(3, 4)
    with running(loaded, linger_s=0) as server:
        assert str(server.service.queue.batching) == "up to 32 rows per call"
        answer = torch.tensor(names["predict"](server.port, x.tolist()))
    torch.testing.assert_close(answer, names["model"](x).detach(), rtol=1e-4, atol=1e-5)


def test_the_guide_names_options_that_exist() -> None:
    text = (ROOT / "docs/deploying.md").read_text()
    named = set(re.findall(r"--([a-z][a-z-]+)", text)) - {
        "size",
        "inputs",
        "outputs",
        "rounds",
        "import",
        "json",
        "to",
    }
    known = {field.name.replace("_", "-") for field in fields(Options)}
    assert named and named <= known


def test_the_command_line_has_every_option() -> None:
    given = inspect.signature(serve).parameters
    for field in fields(Options):
        assert given[field.name].default == (
            field.default or None if field.name == "imports" else field.default
        )


def instructions() -> list[tuple[str, str]]:
    """Dockerfile lines as (instruction, rest), comments left out."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_the_dockerfile_has_two_stages_and_copies_what_is_there() -> None:
    stages = [rest for word, rest in instructions() if word == "FROM"]
    assert len(stages) == 2 and stages[0].endswith("AS build") and "slim" in stages[1]
    known = {
        "FROM",
        "ARG",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {word for word, _ in instructions()} <= known
    ignored = (ROOT / ".dockerignore").read_text().split()
    for word, rest in instructions():
        if word != "COPY" or "--from=build" in rest:
            continue
        for source in shlex.split(rest)[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in ignored
    last = max(place for place, (word, _) in enumerate(instructions()) if word == "FROM")
    assert not any(word == "RUN" for word, _ in instructions()[last:])


def test_the_dockerfile_installs_extras_that_exist_and_starts_the_server() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    (named,) = re.findall(r'"\.\[(.*?)\]"', install)
    assert set(named.split(",")) <= set(extras)
    entry = json.loads(next(rest for word, rest in instructions() if word == "ENTRYPOINT"))
    command = json.loads(next(rest for word, rest in instructions() if word == "CMD"))
    assert entry == ["python", "-m", "intarsia.serve"]
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--host")
    assert parser.parse_args(command).host == "0.0.0.0"


# `intarsia run`: a saved module on files and on random inputs.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model, fast = scores()
    path = tmp_path_factory.mktemp("archives") / "scores.intarsia"
    intarsia.save(fast, path)
    return model, path


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["run", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("kind", [".npz", ".safetensors"])
def test_from_a_file_to_a_file(saved: tuple[nn.Module, Path], tmp_path: Path, kind: str) -> None:
    model, path = saved
    tensors, given, made = request(4), tmp_path / f"in{kind}", tmp_path / f"out{kind}"
    if kind == ".npz":
        np.savez(given, **{name: value.numpy() for name, value in tensors.items()})
    else:
        given.write_bytes(safetensors.torch.save(tensors))
    printed = run(path, "--inputs", given, "--outputs", made, "--rounds", "2")
    assert "scores: float32 (4, 3)" in printed and "nothing: None" in printed and "median" in printed
    if kind == ".npz":
        with np.load(made) as found:
            answer = {name: torch.from_numpy(found[name]) for name in found.files}
    else:
        answer = safetensors.torch.load_file(made)
    assert right(answer, model, tensors)


def test_random_inputs_of_a_size(saved: tuple[nn.Module, Path]) -> None:
    symbol = next(iter(intarsia.load(saved[1]).lowered.range_constraints))
    first = run(saved[1], "--size", f"{symbol}=7", "--rounds", "0")
    assert "scores: float32 (7, 3)" in first and "median" not in first
    assert run(saved[1], "--size", f"{symbol}=7", "--rounds", "0") == first
    assert run(saved[1], "--size", f"{symbol}=7", "--rounds", "0", "--seed", "1") != first


@pytest.mark.parametrize("name", ["nested", "counter", "sizes"])
def test_modules_of_every_kind(name: str, tmp_path: Path) -> None:
    specimen = MODELS[name]()
    fast = intarsia.compile(specimen.model, specimen.args, **specimen.options, engines="pytorch")
    intarsia.save(fast, tmp_path / "x.intarsia")
    printed = run(tmp_path / "x.intarsia", "--rounds", "1")
    assert ("not timed" in printed) == (name == "counter")
    assert ("rest.1.0: float32" in printed) == (name == "nested")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "rows"], "NAME=NUMBER"),
        (["--size", "nothing=3"], "there is no dynamic size 'nothing'"),
        (["--outputs", "x.txt"], "neither"),
        (["--inputs", "x.csv"], "neither"),
        (["--inputs", "junk.npz"], "not a .npz file"),
        (["--inputs", "junk.safetensors"], "not a safetensors file"),
        (["--inputs", "junk.npz", "--size", "rows=2"], "--size is for random"),
    ],
)
def test_mistakes_are_one_sentence(
    saved: tuple[nn.Module, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("junk.npz", "junk.safetensors"):
        Path(name).write_bytes(b"junk" * 10)
    with pytest.raises(InputError, match=said):
        run(saved[1], *words)


def test_inputs_of_another_shape(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    given = tmp_path / "in.safetensors"
    given.write_bytes(safetensors.torch.save({**request(2), "words": torch.zeros(2, 4, dtype=torch.long)}))
    with pytest.raises(InputError, match="compiled for 5"):
        run(saved[1], "--inputs", given)

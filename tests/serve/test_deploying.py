"""The guide's example runs, and the Dockerfile copies and starts what there is."""

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

import pytest
import torch
from tests.serve.harness import running

import intarsia
from intarsia.cli.running import serve
from intarsia.serve.app import Options

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

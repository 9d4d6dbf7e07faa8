"""`intarsia run`: a saved module on files and on random inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.archive.models import MODELS
from tests.serve.models import scores
from tests.serve.test_http import request, right
from torch import nn
from typer.testing import CliRunner

import intarsia
from intarsia.cli.main import app
from intarsia.errors import InputError


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

"""A second compile of the same model builds no engine; any difference, damage or lack of room builds anew."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.compiler import build_cache
from intarsia.engines import OnnxRuntime, OpenVINO

X = torch.linspace(-1, 1, 32).reshape(2, 16)
KEPT = "no engine was built"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the engines that build something, in order; a cache of the test's own."""
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("INTARSIA_CACHE_GB", "1")
    monkeypatch.setattr(build_cache, "LEAST_S", 0.0)
    made: list[str] = []
    for kind in (OpenVINO, OnnxRuntime):

        def build(self: Any, net: Any, old: Any = kind.build) -> Any:
            made.append(self.name)
            return old(self, net)

        monkeypatch.setattr(kind, "build", build)
    return made


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).eval()


def compiled(model: nn.Module, *args: torch.Tensor, **wishes: Any) -> Any:
    return intarsia.compile(model, args or (X,), min_block_size=1, **{"engines": "onnxruntime", **wishes})


def is_kept(module: Any) -> bool:
    return any(note.startswith(KEPT) for note in module.notes)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("verify", [True, False])
def test_the_second_compile_builds_nothing(engine: str, verify: bool, built: list[str]) -> None:
    first = compiled(make(), engines=engine, verify=verify)
    assert built and not is_kept(first)
    built.clear()
    model = make()
    second = compiled(model, engines=engine, verify=verify)
    assert not built and is_kept(second)
    assert torch.equal(first(X), second(X))
    assert str(first.plan) == str(second.plan)
    assert list(second.state_dict()) == list(model.state_dict())
    second.refit(make(seed=1))  # it is a compiled module like any other
    assert torch.allclose(second(X), make(seed=1)(X), atol=1e-5)
    with torch.no_grad():
        model[0].weight.add_(1)
    again = compiled(make(), engines=engine, verify=verify)
    assert torch.equal(again(X), first(X))  # the file is not the model's memory


def test_another_version_of_the_engine_builds_anew(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(make())
    built.clear()
    monkeypatch.setattr(OnnxRuntime, "version", lambda engine: "onnxruntime 99.0")
    assert not is_kept(compiled(make())) and built


class Step(nn.Module):
    """One operation that a careless key would take for another."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step, self.linear = step, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.step(self.linear(x), y)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: x * 2 + y, lambda x, y: x * 3 + y),
        (lambda x, y: (x + y).sum(0), lambda x, y: (x + y).sum(1)),
        (lambda x, y: x * 1 + y, lambda x, y: x * True + y),
        (lambda x, y: (x + y).to(torch.float64), lambda x, y: (x + y).to(torch.float32)),
    ],
    ids=["order", "factor", "axis", "type", "dtype"],
)
def test_other_graphs_are_other_entries(one: Any, other: Any, built: list[str]) -> None:
    y = torch.linspace(2, 3, 32).reshape(2, 16)
    modules = []
    for step in (one, other):
        torch.manual_seed(0)
        modules.append(compiled(Step(step).eval(), X, y))
    assert not is_kept(modules[1])
    torch.manual_seed(0)
    expected = Step(other).eval()(X, y)
    assert torch.allclose(modules[1](X, y), expected, atol=1e-5)


def test_other_weights_inputs_options_and_threads_are_other_entries(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(make())
    assert not is_kept(compiled(make(seed=1)))
    assert not is_kept(compiled(make(), torch.cat([X, X])))
    assert not is_kept(compiled(make(), X + 1))  # what was verified is part of it
    assert not is_kept(compiled(make(), engines=OnnxRuntime(threads=2)))
    assert not is_kept(compiled(make(), rewrite=False))
    assert not is_kept(compiled(make(), dynamic_shapes={"input": {0: Dim("n", min=1, max=8)}}))
    monkeypatch.setattr("intarsia.compiler.build_cache.machine_key", lambda: "another")
    assert not is_kept(compiled(make()))
    monkeypatch.undo()


def test_a_pattern_or_converter_of_the_users_own_is_never_kept(built: list[str]) -> None:
    from intarsia.convert import converter, registry
    from intarsia.network import functional as F

    compiled(make())

    with registry.override():  # what is registered inside is forgotten

        @converter(torch.ops.aten.gelu.default, priority=intarsia.ConverterPriority.HIGH)
        def own_gelu(ctx: Any, self: Any, *, approximate: str = "none") -> Any:
            return F.relu(self)

        module = compiled(make(), verify=False)
        assert not is_kept(module)
        assert torch.allclose(module(X), make()[2](make()[0](X).relu()), atol=1e-5)
    assert is_kept(compiled(make()))


def _entry(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "built").iterdir()
    return path


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "other"])
def test_a_damaged_entry_is_built_again(damage: str, built: list[str], tmp_path: Path) -> None:
    expected = compiled(make())(X)
    path = _entry(tmp_path)
    data = path.read_bytes()
    if damage == "flipped":
        at = data.index(make()[0].weight.detach().numpy().tobytes()) + 7
        path.write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    else:  # whole, but of another model
        path.unlink()
        compiled(make(seed=1))
        _entry(tmp_path).rename(path)
    built.clear()
    again = compiled(make())
    assert built and not is_kept(again)
    assert torch.equal(again(X), expected)
    assert is_kept(compiled(make()))  # and is there again


def test_a_folder_that_cannot_be_written_to_is_told_once(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="builds are not cached"):
        first = compiled(make())
    assert torch.allclose(first(X), make()(X), atol=1e-5)


def test_what_does_not_fit_is_not_kept_and_the_oldest_go_first(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTARSIA_CACHE_GB", "0.000000001")
    compiled(make())
    assert not (tmp_path / "cache" / "built").exists()
    monkeypatch.setenv("INTARSIA_CACHE_GB", "1")
    compiled(make())
    size = _entry(tmp_path).stat().st_size
    monkeypatch.setenv("INTARSIA_CACHE_GB", str(2.5 * size / 1e9))
    compiled(make(seed=1))
    folder = tmp_path / "cache" / "built"
    for age, path in enumerate(sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime)):
        os.utime(path, (1000 + age, 1000 + age))
    assert is_kept(compiled(make()))  # used now: the other one is older
    compiled(make(seed=2))
    assert is_kept(compiled(make())) and is_kept(compiled(make(seed=2)))
    assert not is_kept(compiled(make(seed=1)))


@pytest.mark.full
def test_two_processes_at_once_and_one_killed(built: list[str], tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import torch, intarsia, sys
        from intarsia.compiler import build_cache
        build_cache.LEAST_S = 0.0
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
        x = torch.linspace(-1, 1, 32).reshape(2, 16)
        fast = intarsia.compile(model, (x,), min_block_size=1, engines="onnxruntime")
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        print(any("no engine was built" in note for note in fast.notes))
        """
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in "ab"]
    assert all(process.wait(timeout=200) == 0 for process in both)
    folder = tmp_path / "cache" / "built"
    assert len(list(folder.iterdir())) == 1
    draft = folder / ".left.1234"
    draft.write_bytes(b"half of it")
    os.utime(draft, (1000, 1000))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
    compiled(make(seed=1))
    assert not draft.exists()

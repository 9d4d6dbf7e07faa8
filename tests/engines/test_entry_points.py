"""An engine that another package brings: found by its entry point, compiled with, told of in the plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import known_engines
from intarsia.errors import EngineError

# The outside engine is real: it runs ONNX's own reference implementation.
CODE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from onnx.reference import ReferenceEvaluator

from intarsia.engines import NetworkEngine
from intarsia.network.serialize import to_proto

CALLS = []


@dataclass(frozen=True)
class Outside(NetworkEngine):
    name: ClassVar[str] = "outside"

    def unavailable(self):
        return None

    def probe(self, net):
        kinds = [layer.kind for layer in net.get_layers()]
        return "outside knows no Tanh" if "Tanh" in kinds else None

    def build(self, net):
        model, _ = to_proto(net, weights_outside=False)
        run, names = ReferenceEvaluator(model).run, [tensor.name for tensor in net.get_inputs()]

        def program(*inputs):
            CALLS.append(len(inputs))
            feed = dict(zip(names, (x.numpy(force=True) for x in inputs), strict=True))
            return tuple(torch.from_numpy(made) for made in run(None, feed))

        return program
"""


def install(folder: Path) -> None:
    """`outside_engine`, as pip would leave it: a module and a dist-info directory."""
    (folder / "outside_engine.py").write_text(CODE)
    info = folder / "outside_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[intarsia.engines]\noutside = outside_engine:Outside\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("outside_engine", None)


@pytest.fixture
def package(folder: Path) -> None:
    install(folder)


@pytest.mark.usefixtures("package")
def test_an_outside_package_brings_an_engine() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    assert list(known_engines())[-1] == "pytorch" and "outside" in known_engines()
    compiled = intarsia.compile(model, (x,), engines=["outside"], min_block_size=1)
    assert [segment.engine for segment in compiled.plan.segments] == ["outside", "pytorch", "outside"]
    assert "outside knows no Tanh" in str(compiled.plan)
    calls = sys.modules["outside_engine"].CALLS
    before = len(calls)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(calls) == before + 2, "both segments ran on the outside engine"


def test_a_package_installed_while_the_process_runs_is_found(folder: Path) -> None:
    with pytest.raises(EngineError, match="there is no engine 'outside'"):
        intarsia.compile(nn.ReLU(), (torch.randn(2),), engines=["outside"])
    install(folder)
    fast = intarsia.compile(nn.ReLU(), (torch.randn(2),), engines=["outside"], min_block_size=1)
    assert fast.plan.engines == ("outside",)


def test_without_the_package_its_engine_is_unknown() -> None:
    with pytest.raises(EngineError, match="there is no engine 'outside'"):
        intarsia.compile(nn.ReLU(), (torch.randn(2),), engines=["outside"])

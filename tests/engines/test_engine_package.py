"""The example of an engine in a package of its own: installed, fused for, measured, saved, loaded, cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[2] / "examples" / "engine_package"

# One process a version of the package: it prints what it saw as JSON.
SCRIPT = """
import collections, json, sys
import torch
from torch import nn
import intarsia
import intarsia_numpy
from intarsia.choose.memory import Memory
from intarsia.engines import default_engines, known_engines

folder = sys.argv[1]
calls, counts = collections.Counter(), collections.Counter()
for kind, function in list(intarsia_numpy.OPERATORS.items()):
    def counted(*operands, kind=kind, function=function, **attributes):
        calls[kind] += 1
        return function(*operands, **attributes)
    intarsia_numpy.OPERATORS[kind] = counted
for method in ("build", "unpack"):
    def noted(self, *args, method=method, old=getattr(intarsia_numpy.NumPy, method)):
        counts[method] += 1
        return old(self, *args)
    setattr(intarsia_numpy.NumPy, method, noted)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        x = self.up(x)
        return self.down(x * 0.5 * (1.0 + torch.erf(x / 2**0.5)))


torch.manual_seed(0)
model, x = Net().eval(), torch.linspace(-1, 1, 96).reshape(3, 32)
expected = model(x)
seen = {
    "version": known_engines()["numpy"]().version(),
    "default": "numpy" in [engine.name for engine in default_engines()],
}

options = {"engines": ["numpy"], "min_block_size": 1}
fused = intarsia.compile(model, (x,), rewrite=True, partition="dependency", **options)
calls.clear()
seen["fused"] = {"error": float((fused(x) - expected).abs().max()), "calls": dict(calls)}
seen["engines"] = fused.plan.engines

# Alone it leads, so its variants are measured however fast its layers run here.
alone = {**options, "require_full_compilation": True}
searched = intarsia.compile(model, (x,), partition=intarsia.Measured(budget_s=60), **alone)
seen["trials"] = [trial.name for trial in searched.plan.findings.trials]
seen["searches"] = len(Memory()._searches.read())

file = f"{folder}/net.intarsia"
if not sys.argv[2:]:
    intarsia.save(fused, file)
counts.clear()
loaded = intarsia.load(file)
seen["loaded"] = {"error": float((loaded(x) - expected).abs().max()), "counts": dict(counts)}
print(json.dumps(seen))
"""


def install(folder: Path) -> None:
    """The package as pip installs it, with neither network nor dependencies."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "--target", str(folder), str(PACKAGE)], check=True)


def run(folder: Path, *more: str) -> dict[str, Any]:
    path = os.pathsep.join([str(folder / "packages"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "INTARSIA_CACHE": str(folder / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.slow
def test_an_engine_in_a_package_of_its_own(tmp_path: Path) -> None:
    install(tmp_path / "packages")
    first = run(tmp_path)
    assert first["version"].startswith("intarsia_numpy 1.0, numpy ") and not first["default"]
    assert first["engines"] == ["numpy"]
    # Fused for: the shipped pattern has made a Gelu of what the model computes by Erf.
    assert first["fused"]["calls"] == {"Gemm": 2, "Gelu": 1} and first["fused"]["error"] < 1e-5
    # Measured, with the options that it proposes.
    assert {"numpy", "numpy, column major"} <= set(first["trials"])
    assert first["searches"] == 1
    # Saved and loaded: its packed program is used, nothing is built.
    assert first["loaded"]["counts"] == {"unpack": 1} and first["loaded"]["error"] < 1e-5

    # Another version: what was measured and packed for the first one does not hold.
    (information,) = (tmp_path / "packages").glob("intarsia_numpy-*.dist-info/METADATA")
    information.write_text(information.read_text().replace("Version: 1.0\n", "Version: 1.1\n"))
    second = run(tmp_path, "load")
    assert second["version"].startswith("intarsia_numpy 1.1, ")
    assert second["searches"] == 2
    assert second["loaded"]["error"] < 1e-5

"""`intarsia.export`: files that engines' own runtimes load, in processes that do not import this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import intarsia
from intarsia.cli import zoo
from intarsia.errors import ArchiveError

WITHOUT_US = """
import json, sys
import numpy as np

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "intarsia":
            raise ImportError("this process must do without intarsia")

sys.meta_path.insert(0, Refusing())
given = dict(np.load("inputs.npz"))
"""
ONNX = """
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
wanted = {item.name: given[item.name] for item in session.get_inputs()}
np.savez("outputs.npz", *session.run(None, wanted))
"""
OPENVINO = """
import openvino
model = openvino.compile_model(sys.argv[1], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
made = model({port.get_any_name(): given[port.get_any_name()] for port in model.inputs})
np.savez("outputs.npz", *[made[port] for port in model.outputs])
"""
PIECES = """
from pathlib import Path
import onnxruntime, torch

folder = Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
values = {item["name"]: given[item["name"]] for item in manifest["inputs"]}
for piece in manifest["pieces"]:
    inputs = [values[name] for name in piece["inputs"]]
    if piece["file"].endswith(".onnx"):
        session = onnxruntime.InferenceSession(folder / piece["file"], providers=["CPUExecutionProvider"])
        made = session.run(None, dict(zip(piece["inputs"], inputs)))
    else:
        program = torch.export.load(folder / piece["file"]).module()
        made = [value.numpy() for value in program(*map(torch.from_numpy, inputs))]
    values.update(zip(piece["outputs"], made))
np.savez("outputs.npz", *[values[item["name"]] for item in manifest["outputs"]])
"""


def run_without_us(script: str, path: Path, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What a runtime by itself computes with a file."""
    folder = path.parent
    np.savez(folder / "inputs.npz", **{name: value.numpy() for name, value in inputs.items()})
    command = [sys.executable, "-c", WITHOUT_US + script, path.name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    with np.load(folder / "outputs.npz") as made:
        return [torch.from_numpy(made[name]) for name in made.files]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(torch.relu(self.conv(x)).mean((2, 3))), -1)


class Mixed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.special.i0(torch.relu(self.conv(x)))  # no engine has this operator
        return torch.softmax(self.head(x.mean((2, 3))), -1)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("engine", "name", "script"), [
    ("onnxruntime", "net.onnx", ONNX),
    pytest.param("openvino", "net.xml", OPENVINO, marks=pytest.mark.openvino),
])  # fmt: skip
def test_one_engine_is_one_plain_file(
    engine: str, name: str, script: str, x: torch.Tensor, tmp_path: Path
) -> None:
    model = Net().eval()
    exported = intarsia.export(intarsia.compile(model, (x,), engines=engine), tmp_path / name)
    assert not exported.is_folder and exported.path == tmp_path / name
    (made,) = run_without_us(script, exported.path, {"x": x})
    torch.testing.assert_close(made, model(x))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name", "script"), [
    ("onnxruntime", "bert.onnx", ONNX),
    pytest.param("openvino", "bert.xml", OPENVINO, marks=pytest.mark.openvino),
])  # fmt: skip
def test_rewriting_is_part_of_the_file(engine: str, name: str, script: str, tmp_path: Path) -> None:
    specimen = zoo.specimen("bert")
    fast = intarsia.compile(specimen.model, specimen.args, specimen.kwargs, engines=engine, rewrite=True)
    exported = intarsia.export(fast, tmp_path / name)
    if name.endswith(".onnx"):
        import onnx

        kinds = {node.op_type for node in onnx.load(exported.path).graph.node}
        assert kinds & {"Attention", "SkipLayerNormalization", "LayerNormalization", "BiasGelu"}, kinds
    inputs = {"input_ids": specimen.args[0], **specimen.kwargs}
    made = run_without_us(script, exported.path, inputs)
    answer = specimen.module(*specimen.args, **specimen.kwargs)
    torch.testing.assert_close(made[0], answer.last_hidden_state, rtol=1e-4, atol=1e-5)


def test_several_engines_are_a_folder_with_a_manifest(x: torch.Tensor, tmp_path: Path) -> None:
    model = Mixed().eval()
    fast = intarsia.compile(model, (x,), engines="onnxruntime", min_block_size=1)
    with pytest.raises(ArchiveError, match="no engine holds the whole plan"):
        intarsia.export(fast, tmp_path / "mixed.onnx")
    exported = intarsia.export(fast, tmp_path / "mixed")
    assert exported.is_folder
    manifest = json.loads((exported.path / "manifest.json").read_text())
    assert [piece["engine"] for piece in manifest["pieces"]] == ["onnxruntime", "pytorch", "onnxruntime"]
    (made,) = run_without_us(PIECES, exported.path, {"x": x})
    torch.testing.assert_close(made, model(x))
    with pytest.raises(ArchiveError, match="exists already"):
        intarsia.export(fast, tmp_path / "mixed")


def test_sizes_that_vary_vary_in_the_file(x: torch.Tensor, tmp_path: Path) -> None:
    model = Net().eval()
    rows = intarsia.Input(min_shape=(1, 3, 8, 8), opt_shape=(2, 3, 8, 8), max_shape=(6, 3, 8, 8))
    exported = intarsia.export(intarsia.compile(model, (rows,), engines="onnxruntime"), tmp_path / "a.onnx")
    many = torch.cat([x, x])
    (made,) = run_without_us(ONNX, exported.path, {"x": many})
    torch.testing.assert_close(made, model(many))


def test_a_program_of_pytorch(x: torch.Tensor, tmp_path: Path) -> None:
    model = Mixed().eval()
    intarsia.export(intarsia.compile(model, (x,)), tmp_path / "mixed.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "mixed.pt2").module()(x), model(x))


def test_a_saved_file_is_exported(x: torch.Tensor, tmp_path: Path) -> None:
    model = Net().eval()
    intarsia.save(intarsia.compile(model, (x,), engines="onnxruntime"), tmp_path / "net.intarsia")
    exported = intarsia.export(intarsia.load(tmp_path / "net.intarsia"), tmp_path / "net.onnx")
    (made,) = run_without_us(ONNX, exported.path, {"x": x})
    torch.testing.assert_close(made, model(x))


def test_what_has_no_plain_file_is_refused(x: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="not a compiled module"):
        intarsia.export(nn.ReLU(), tmp_path / "a.onnx")
    fast = intarsia.compile(Net().eval(), (x,), engines="onnxruntime")
    with pytest.raises(ArchiveError, match=r"runs on onnxruntime; a\.xml is not a file \.onnx"):
        intarsia.export(fast, tmp_path / "a.xml")

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    with pytest.raises(ArchiveError, match="a call changes count"):
        intarsia.export(intarsia.compile(Counting().eval(), (torch.ones(3),)), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())

"""The mistakes people make most: each ends with one sentence that names the value and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.command import Command
from torch import nn

import intarsia as package

MAKE = "models.py:make"

# Words, and what the sentence must hold.
MISTAKES = {
    "a name with a typing error": (["explain", "brt"], "did you mean 'bert'"),
    "a name nobody knows": (["explain", "no-such-model"], "FILE.py:FUNCTION"),
    "an architecture nobody knows": (["demo", "brt"], "the architectures are bert, distilbert"),
    "a file that is not there": (["explain", "modls.py:make"], "did you mean 'models.py'"),
    "a file without a function": (["explain", "models.py"], "write models.py:FUNCTION"),
    "a function that is not there": (["explain", "models.py:mke"], "did you mean 'make'"),
    "a module for a file": (["explain", "nomodule:make"], "there is no module 'nomodule'"),
    "a file that cannot be imported": (["explain", "broken.py:make"], "cannot be imported: SyntaxError"),
    "a function that returns a model": (["explain", "models.py:only_model"], "must return (model, args)"),
    "a model in place of a function": (["explain", "holds_model.py:net"], "is a model; give a function"),
    "args that are a tensor": (["explain", "models.py:tensor_as_args"], "make it a tuple: (args,)"),
    "kwargs that are a list": (["explain", "models.py:list_as_kwargs"], "make it a dict"),
    "a function that raises": (["explain", "models.py:raises"], "raised ValueError: no such checkpoint"),
    "inputs of a wrong shape": (["explain", "models.py:wrong_shape"], "fails on the example itself"),
    "weights without a model": (["explain", "weights.pt"], "has weights without a model"),
    "an ONNX file as the model": (["explain", "model.onnx"], "intarsia check MODEL --against model.onnx"),
    "a program that is damaged": (["explain", "damaged.pt2"], "is not a file of torch.export.save"),
    "a folder that holds no model": (["explain", "folder"], "folder has no config.json"),
    "an engine nobody knows": (["explain", MAKE, "--engines", "tensorrt"], "there is no engine 'tensorrt'"),
    "an option nobody knows": (["explain", MAKE, "-O", "tolrance=0.1"], "did you mean 'tolerance'"),
    "an option without a value": (["explain", MAKE, "-O", "tolerance"], "NAME=VALUE"),
    "a range without a form": (["compile", MAKE, "-o", "x", "--range", "input=3"], "INPUT.DIM=MIN:MAX"),
    "a range of no input": (["check", MAKE, "--range", "x.0=1:3"], "not a tensor of the call; they are in"),
    "a range that ends early": (["check", MAKE, "--range", "input.0=5:2"], "2 must be more than 5"),
    "a range without the example": (["explain", MAKE, "--range", "input.0=5:9"], "the example's input.0 = 2"),
    "a range of no dimension": (["check", MAKE, "--range", "input.2=1:3"], "input has 2 dimensions"),
    "a strategy nobody knows": (["explain", MAKE, "-O", "partition=fastest"], "fastest"),
    "compiling what is compiled": (["compile", "saved.intarsia", "-o", "x"], "is compiled already"),
    "a folder to write to that is not there": (["compile", MAKE, "-o", "no/x"], "there is no folder no"),
    "running a file that is not there": (["run", "no.intarsia"], "no.intarsia"),
    "running a file of another kind": (["run", "models.py"], "models.py cannot be loaded"),
    "serving a file that is not there": (["serve", "no.intarsia"], "no.intarsia"),
    "inputs of an unknown kind": (["run", "saved.intarsia", "--inputs", "x.csv"], "neither .npz nor"),
    "a size that does not vary": (["run", "saved.intarsia", "--size", "batch=3"], "no dynamic size 'batch'"),
    "a size without a number": (["run", "saved.intarsia", "--size", "batch"], "NAME=NUMBER"),
    "a candidate that is not there": (["check", MAKE, "--against", "no.onnx"], "there is no file no.onnx"),
    "a candidate that is damaged": (["check", MAKE, "--against", "model.onnx"], "cannot load model.onnx"),
    "a candidate that takes no model": (["check", MAKE, "--against", MAKE], "raised TypeError: make() takes"),
    "a model that fails on its example": (["check", "models.py:wrong_shape", "--against", "models.py:same"],
        "fails on its example inputs"),
    "a runtime nobody knows": (["export", MAKE, "--to", "tflite"], "--to tflite is none of pt2, openvino"),
    "balancing by what is unknown": (["split", MAKE, "--by", "speed"], "neither time nor memory"),
    "no ranks": (["pipeline", "draw", "--ranks", "0"], "--ranks=0"),
    "a schedule nobody knows": (["pipeline", "draw", "--schedule", "Fancy"], "Fancy"),
    "a picture in no folder": (["pipeline", "draw", "--picture", "/no/such/a.svg"], "no folder /no/such"),
    "a picture of no kind": (["pipeline", "draw", "--picture", "a.bmp"], "ends in .svg, .png, .pdf"),
    "a script that is not there": (["tune", "no_script.py"], "no_script.py"),
    "a command nobody knows": (["explian", MAKE], "Did you mean 'explain'?"),
    "no model": (["explain"], "Missing argument 'MODEL'"),
    "an option with a typing error": (["explain", MAKE, "--jsn"], "--json"),
    "an option that is no number": (["bench", MAKE, "--seconds", "long"], "--seconds"),
}  # fmt: skip


@pytest.fixture
def files(models: str, tmp_path: Path) -> Path:
    """A folder with what the mistakes name."""
    (tmp_path / "broken.py").write_text("def make(:\n")
    (tmp_path / "holds_model.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "damaged.pt2").write_bytes(b"PK damaged")
    (tmp_path / "x.csv").write_text("1,2\n")
    (tmp_path / "folder").mkdir()
    fast = package.compile(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), engines="pytorch")
    package.save(fast, tmp_path / "saved.intarsia")
    return tmp_path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, files: Path, intarsia: Command) -> None:
    words, said = MISTAKES[mistake]
    outcome = intarsia(*words)
    assert outcome.code == 2, outcome
    assert said in outcome.err and "Traceback" not in outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert "torch/export" not in outcome.err  # torch's own account of it

"""Saved here, loaded in a new process: equal answers, equal plans, equal state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.archive.models import MODELS
from torch.utils import _pytree as pytree

import intarsia
from intarsia.cli import zoo
from intarsia.compare import disagreement

pytestmark = pytest.mark.slow

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
Saved = dict[str, tuple[Any, Calls]]  # compiled modules with calls to compare


def check_elsewhere(saved: Saved, folder: Path, *imports: str) -> None:
    for name, (fast, calls) in saved.items():
        intarsia.save(fast, folder / f"{name}.intarsia")
        torch.save(calls, folder / f"{name}.calls")
    command = [sys.executable, Path(__file__).with_name("other_process.py"), folder, *imports]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    for name, (fast, calls) in saved.items():
        check_equal(name, fast, calls, torch.load(folder / f"{name}.answers", weights_only=False))


def check_equal(name: str, fast: Any, calls: Calls, made: dict[str, Any]) -> None:
    for (args, kwargs), (answer, changed) in zip(calls, made["answers"], strict=True):
        expected = fast(*args, **kwargs)
        assert pytree.tree_structure(expected) == pytree.tree_structure(answer), name
        pairs = zip(pytree.tree_leaves((expected, args)), pytree.tree_leaves((answer, changed)), strict=True)
        for one, other in pairs:
            assert type(one) is type(other), name
            if isinstance(one, torch.Tensor):
                assert disagreement([other], [one]) is None, name
            else:
                assert one == other, name
    assert made["plan"] == str(fast.plan)
    assert made["notes"] == fast.notes
    assert made["state"].keys() == fast.state_dict().keys()
    for key, tensor in fast.state_dict().items():
        assert torch.equal(made["state"][key], tensor), (name, key)
        assert made["state"][key].stride() == tensor.stride(), (name, key)


ENGINES = (None, "openvino", "onnxruntime", "pytorch")


@pytest.mark.openvino
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.full)], ids=["one", "each"])
def test_models_of_every_kind(each: bool, tmp_path: Path) -> None:
    """On one of the engines in turn or on each of them, and on a mix; one new process loads all."""
    torch.manual_seed(0)
    saved: Saved = {}
    for number, (name, make) in enumerate(MODELS.items()):
        for engines in ENGINES if each else (ENGINES[number % len(ENGINES)],):
            specimen = make()
            wishes = {"engines": engines, "min_block_size": 1, **specimen.options}
            fast = intarsia.compile(specimen.model, specimen.args, **wishes)
            saved[f"{name}-{engines}"] = fast, [(args, {}) for args in (specimen.args, *specimen.calls)]
    specimen = MODELS["attention"]()
    support = {
        "openvino": ["aten.linear.default"],
        "onnxruntime": ["aten.layer_norm.default", "aten.relu.default"],
    }
    fast = intarsia.compile(specimen.model, specimen.args, min_block_size=1, backend_support_map=support)
    assert set(fast.plan.engines) == {"openvino", "onnxruntime", "pytorch"}
    saved["mixed"] = fast, [(specimen.args, {})]
    check_elsewhere(saved, tmp_path)


def _check_zoo(names: list[str], folder: Path) -> None:
    saved: Saved = {}
    imports = {"transformers.modeling_outputs"}  # where types of results are defined, and registered
    for name in names:
        specimen = zoo.specimen(name)
        fast = intarsia.compile(specimen.model, specimen.args, specimen.kwargs)
        saved[name] = fast, [(specimen.args, specimen.kwargs)]
        made = type(fast(*specimen.args, **specimen.kwargs)).__module__
        imports |= {made} if made.startswith("transformers.") else set()
    check_elsewhere(saved, folder, *sorted(imports))


def test_real_architectures(tmp_path: Path) -> None:
    _check_zoo(["bert", "resnet50", "gpt2"], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.names())
def test_every_architecture(name: str, tmp_path: Path) -> None:
    _check_zoo([name], tmp_path)

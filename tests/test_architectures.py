"""Whole architectures on each engine alone and on both: equal to eager, nearly all nodes on engines."""

from __future__ import annotations

import pytest
import torch

import intarsia
from intarsia.capture.export import capture
from intarsia.cli import zoo
from intarsia.compare import relative_error

pytest.importorskip("transformers", reason="the architectures come from Hugging Face configurations")
pytest.importorskip("onnxruntime", reason="the engine under test")
pytest.importorskip("openvino", reason="the engine under test")

EACH_ALONE = (["onnxruntime"], ["openvino"])
BOTH = ["openvino", "onnxruntime"]


def check(name: str, *line_ups: list[str]) -> None:
    thing = zoo.specimen(name)
    with torch.no_grad():
        expected = thing.model(*thing.args, **thing.kwargs)
    program = capture(thing.model, thing.args, thing.kwargs)
    for engines in line_ups:
        fast = intarsia.compile(program, thing.args, thing.kwargs, engines=engines, min_block_size=1)
        answer = fast(*thing.args, **thing.kwargs)
        assert type(answer) is type(expected)
        assert relative_error(answer, expected) <= 1e-4, engines
        assert fast.plan.on_engines >= 0.95, f"{engines}\n{fast.plan}"


@pytest.mark.parametrize("name", zoo.names())
def test_equal_to_eager(name: str) -> None:
    check(name, *EACH_ALONE)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_equal_to_eager_on_both_engines(name: str) -> None:
    check(name, BOTH)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.names())
def test_every_architecture_on_both_engines(name: str) -> None:
    check(name, BOTH)


def test_a_model_that_was_never_run_before() -> None:
    """SegFormer installs hooks when it is first run; run again as if it had not been, it had two of each."""
    thing = zoo.specimen("segformer")
    fast = intarsia.compile(thing.model, thing.args, thing.kwargs, engines="onnxruntime", min_block_size=1)
    assert isinstance(fast, intarsia.Compiled)
    with torch.no_grad():
        expected = thing.model.eval()(*thing.args, **thing.kwargs)
    assert relative_error(fast(*thing.args, **thing.kwargs), expected) <= 1e-4

"""Whole architectures on each engine alone and on both: equal to eager, nearly all nodes on engines.

Their plans as text are in tests/partition/goldens; run with UPDATE_GOLDENS=1 to write them anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.partition.graphs import refuse
from torch.export import ExportedProgram

import intarsia
from intarsia.capture.export import capture
from intarsia.cli import zoo
from intarsia.compare import relative_error
from intarsia.convert import registry
from intarsia.lower import lower
from intarsia.partition import STRATEGIES, PartitionOptions, dependency

transformers = pytest.importorskip("transformers", reason="the architectures come from Hugging Face")
needs_engines = pytest.mark.skipif(
    not all(map(find_spec, ("onnxruntime", "openvino"))), reason="the engines under test are not installed"
)

EACH_ALONE = (["onnxruntime"], ["openvino"])
BOTH = ["openvino", "onnxruntime"]


GOLDENS = Path(__file__).parent / "partition" / "goldens"
ONE = PartitionOptions(min_block_size=1)
PINNED = torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.22.")
# An engine that knows linear algebra and arithmetic, and none of these.
REFUSED = ("gelu", "softmax", "layer_norm", "hardtanh", "mean", "roll", "silu", "embedding")


@dataclass(frozen=True)
class Captured:
    """An architecture, and what export makes of it."""

    name: str
    thing: zoo.Specimen
    program: ExportedProgram


def captured(name: str) -> Captured:
    thing = zoo.specimen(name)
    return Captured(name, thing, capture(thing.model, thing.args, thing.kwargs))


@pytest.fixture(scope="module", params=zoo.names())
def architecture(request: pytest.FixtureRequest) -> Captured:
    """Captured once for the tests below, which pytest runs one after the other on each."""
    return captured(request.param)


def check(found: Captured, line_ups: Sequence[list[str]]) -> None:
    thing = found.thing
    with torch.no_grad():
        expected = thing.model(*thing.args, **thing.kwargs)
    for engines in line_ups:
        fast = intarsia.compile(found.program, thing.args, thing.kwargs, engines=engines, min_block_size=1)
        answer = fast(*thing.args, **thing.kwargs)
        assert type(answer) is type(expected)
        assert relative_error(answer, expected) <= 1e-4, engines
        assert fast.plan.on_engines >= 0.95, f"{engines}\n{fast.plan}"


@needs_engines
def test_equal_to_eager(architecture: Captured) -> None:
    check(architecture, (*EACH_ALONE, BOTH) if architecture.name in ("bert", "vit") else EACH_ALONE)


@pytest.mark.skipif(not PINNED, reason="other versions of torch and transformers export other graphs")
def test_the_plan_reads_as_it_did(architecture: Captured) -> None:
    gm = lower(capture(architecture.program), has_converter=registry.__contains__).module
    table = refuse(gm, *REFUSED)
    counts = [len(STRATEGIES[name](gm, table, ONE).verify(gm)) for name in ("dependency", "greedy")]
    assert counts[0] <= counts[1]
    text = f"{dependency(gm, table, PartitionOptions(min_block_size=2)).verify(gm)}\n"
    golden = GOLDENS / f"{architecture.name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@needs_engines
@pytest.mark.full
@pytest.mark.parametrize("name", zoo.names())
def test_every_architecture_on_both_engines(name: str) -> None:
    check(captured(name), (BOTH,))


@needs_engines
def test_a_model_that_was_never_run_before() -> None:
    """SegFormer installs hooks when it is first run; run again as if it had not been, it had two of each."""
    thing = zoo.specimen("segformer")
    fast = intarsia.compile(thing.model, thing.args, thing.kwargs, engines="onnxruntime", min_block_size=1)
    assert isinstance(fast, intarsia.Compiled)
    with torch.no_grad():
        expected = thing.model.eval()(*thing.args, **thing.kwargs)
    assert relative_error(fast(*thing.args, **thing.kwargs), expected) <= 1e-4

"""Random models with random refusals on the real engines: every strategy, equal answers."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.build.builder import Builder, BuildSettings
from intarsia.engines import resolve_engines
from intarsia.graph.nodes import compute_nodes
from intarsia.partition import STRATEGIES, PartitionOptions
from intarsia.partition.support import support_table
from intarsia.runtime.inlay import Inlay

from .test_random_models import programs, trace

pytest.importorskip("onnxruntime", reason="an engine under test")
pytest.importorskip("openvino", reason="an engine under test")


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=6, deadline=None)
@given(steps=programs(), seed=st.integers(0, 2**16))
def test_engines_answer_as_pytorch_does(strategy: str, steps: list[tuple[str, int, int]], seed: int) -> None:
    gm = trace(steps, [0, 1], "fake")
    chance = random.Random(seed)
    engines, _ = resolve_engines(["onnxruntime", "openvino"])
    table = support_table(gm, engines)
    refused = {
        node: {name: "not today" for name in ("onnxruntime", "openvino") if chance.random() < 0.4}
        for node in compute_nodes(gm.graph)
    }
    args = [torch.rand(6, 4), torch.rand(6, 4)]
    settings = BuildSettings(PartitionOptions(min_block_size=1), STRATEGIES[strategy])
    builder = Builder(gm, engines, settings, [args])
    built = builder.run(table.with_refusals(refused))
    other = [torch.rand(6, 4), torch.rand(6, 4)]
    answers = Inlay(gm.graph, built).results(other)
    for answer, truth in zip(answers, gm(*other), strict=True):
        if isinstance(truth, torch.Tensor):
            torch.testing.assert_close(
                answer, truth, rtol=1e-4, atol=1e-4, msg=lambda text: f"{text}\n{built.plan}"
            )
        else:
            assert answer == truth

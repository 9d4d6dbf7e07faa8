"""Twelve architectures with padding masks: outputs, gradients and training runs are the plain model's."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
import torch
from hf_zoo import NAMES, error, loss_of, make, plain_step
from pipeline_compare import one_thread  # noqa: F401  (a fixture)
from rank_launch import launch

from intarsia.pipeline import split

# Sums are taken in another order; under autocast what is rounded to bfloat16 may fall to the other side.
EXACT = {"output": 1e-5, "gradient": 1e-4, "loss": 1e-4, "weight": 1e-3}
AUTOCAST = {"output": 2e-2, "gradient": 2e-2, "loss": 1e-2, "weight": 2e-2}


def checked_rows(results: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """The rows of the matrix that the ranks printed; those beyond their bounds are an error."""
    rows = []
    for status, output in results:
        assert status == 0, output
        rows += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    wrong = []
    for row in rows:
        bounds = AUTOCAST if row["autocast"] else EXACT
        wrong += [f"{key} is beyond {most:.0e}: {row}" for key, most in bounds.items() if row[key] > most]
    assert not wrong, "\n".join(wrong)
    return rows


def in_process(name, ways):
    """Outputs and gradients of pipelines of workers against the plain model's; the largest errors."""
    model, call, target = make(name)
    plain = copy.deepcopy(model)
    stages = split(model, (), call, stages=2, by="memory")
    largest = {False: 0.0, True: 0.0}
    for chunks, checkpoint, autocast in ways:
        plain.zero_grad()
        loss, logits = plain_step(plain, call, target, chunks, autocast)
        pipe = stages.gpipe(chunks=chunks, checkpoint=checkpoint)
        pipe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            answer = pipe(**call)
            got = loss_of(answer, target)
        got.backward()
        bounds = AUTOCAST if autocast else EXACT
        assert error(answer.logits, logits) <= bounds["output"]
        assert float(got.detach()) == pytest.approx(float(loss), rel=bounds["loss"])
        want = dict(plain.named_parameters())
        # Some gradients are 0 but for rounding (of the biases of keys): they are held against the others.
        least = max(float(p.grad.abs().max()) for p in want.values() if p.grad is not None) / 1000
        for key, parameter in pipe.named_parameters():
            if want[key].grad is None:
                assert parameter.grad is None or not parameter.grad.any(), key
                continue
            off = error(parameter.grad, want[key].grad, least)
            assert off <= bounds["gradient"], (name, chunks, checkpoint, autocast, key)
            largest[autocast] = max(largest[autocast], off)
    return largest


@pytest.mark.parametrize(
    ("name", "way"),
    [("bert", (4, "always", True)), ("gpt2", (2, "never", False)), ("llama", (4, "except_last", False))],
)
def test_a_sample_in_one_process(name, way):
    in_process(name, [way])


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_every_way_in_one_process(name):
    ways = itertools.product((2, 4), ("always", "except_last", "never"), (False, True))
    print(name, in_process(name, list(ways)))


@pytest.mark.full
@pytest.mark.parametrize("group", range(4))
def test_every_way_on_two_ranks(group):
    """Four schedules, checkpointing and autocast on and off, 20 steps each; three architectures a spawn."""
    rows = checked_rows(launch(":".join(["rank_matrix.every_way", "20", *NAMES[group::4]])))
    assert len(rows) == 2 * 3 * 16

"""Models that no graph holds, cut between their modules, on two processes: equal to the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_distributed import assert_passed, launch

WORKER = Path(__file__).with_name("rank_tree.py")


@pytest.fixture(scope="module")
def ranks() -> list[tuple[int, str]]:
    """What both processes printed: one pair runs every case."""
    return launch("decides", "structures", "refusals", "opt", "compiled", worker=WORKER)


def test_models_that_decide_by_their_data(ranks):
    assert_passed(ranks, *(f"decides {s} ok" for s in ("1F1B", "ZeroBubble", "Interleaved1F1B", "ZBV")))


def test_structures_statistics_and_refusals(ranks):
    assert_passed(ranks, "structures ok", "refusals ok")


def test_opt_in_training(ranks):
    assert_passed(ranks, "opt ok")


def test_compiled_stages(ranks):
    pytest.importorskip("onnxruntime")
    assert_passed(ranks, "compiled ok")

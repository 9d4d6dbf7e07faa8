"""Training over two processes: autocast, losses that average over tokens, recomputation, faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_distributed import assert_passed, launch

WORKER = Path(__file__).with_name("rank_training.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[tuple[int, str]]:
    """What both processes printed: starting a pair costs more than a case, so one pair runs them all."""
    folder = tmp_path_factory.mktemp("ranks") / "saved"
    cases = (
        "autocast:mlp:1F1B:ZBV",
        "autocast_on_one_rank",
        "token_means",
        "loss_inside",
        "recomputing:resnet:1F1B:DualPipeV",
        "raises",
        "bad_loss",
        "plans:3:4",
        "clipping",
        f"checkpoints:{folder}",
    )
    return launch(*cases, worker=WORKER)


def test_autocast(ranks):
    assert_passed(ranks, "autocast mlp ok", "on_one_rank ok")


def test_means_over_tokens(ranks):
    assert_passed(ranks, "token_means ok", "loss_inside ok")


def test_recomputation(ranks):
    assert_passed(ranks, "recomputing resnet ok")


def test_an_exception_in_one_stage_reaches_every_rank(ranks):
    assert_passed(ranks, "raises DualPipeV ok", "bad_loss ok")


def test_plans_of_a_grid_run(ranks):
    assert_passed(ranks, "plans ok")


def test_clipping_and_checkpoints(ranks):
    assert_passed(ranks, "clipping ok", "checkpoints ok")


@pytest.mark.full
def test_autocast_in_every_schedule():
    assert_passed(launch("autocast:mlp", "autocast:gpt2", worker=WORKER), "autocast mlp ok", "gpt2 ok")


@pytest.mark.full
def test_recomputation_in_every_schedule():
    assert_passed(launch("recomputing:resnet", worker=WORKER), "recomputing resnet ok")


@pytest.mark.full
def test_every_plan_of_a_grid_runs():
    assert_passed(launch("plans:1:2:3:4:6:8", worker=WORKER), "plans ok")

"""Training over two processes: autocast, losses that average over tokens, recomputation, faults."""

from __future__ import annotations

from pathlib import Path

from test_distributed import assert_passed, launch

WORKER = Path(__file__).with_name("rank_training.py")


def test_autocast():
    cases = ["autocast:mlp", "autocast:gpt2", "autocast_on_one_rank"]
    assert_passed(launch(*cases, worker=WORKER), "autocast mlp ok", "autocast gpt2 ok", "on_one_rank ok")


def test_means_over_tokens():
    assert_passed(launch("token_means", "loss_inside", worker=WORKER), "token_means ok", "loss_inside ok")


def test_recomputation():
    assert_passed(launch("recomputing:resnet", worker=WORKER), "recomputing resnet ok")


def test_an_exception_in_one_stage_reaches_every_rank():
    assert_passed(launch("raises", "bad_loss", worker=WORKER), "raises DualPipeV ok", "bad_loss ok")


def test_every_plan_of_a_grid_runs():
    assert_passed(launch("plans", worker=WORKER), "plans ok")


def test_clipping_and_checkpoints(tmp_path):
    cases = ["clipping", f"checkpoints:{tmp_path / 'saved'}"]
    assert_passed(launch(*cases, worker=WORKER), "clipping ok", "checkpoints ok")

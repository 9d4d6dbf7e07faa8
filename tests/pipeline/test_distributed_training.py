"""Training over two processes: autocast, losses that average over tokens, recomputation, faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_zoo import make
from test_distributed import assert_passed, launch
from test_meta_load import shards

WORKER = Path(__file__).with_name("rank_training.py")


def shards_of_gpt2(folder: Path) -> Path:
    """A folder of weights, without the name that is tied to another."""
    state = make("gpt2")[0].state_dict()
    return shards(folder, {k: v for k, v in state.items() if k != "lm_head.weight"}, 3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[tuple[int, str]]:
    """What both processes printed: starting a pair costs more than a case, so one pair runs them all."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = (
        "autocast:mlp:1F1B:ZBV",
        "autocast_on_one_rank",
        "token_means",
        "loss_inside",
        "recomputing:resnet:1F1B:DualPipeV",
        "raises",
        "bad_loss",
        "plans:4",
        "rank_plans.clusters",
        "clipping",
        f"checkpoints:{folder / 'saved'}",
        "rank_sizes.shorter:1F1B:ZBV",
        "rank_sizes.axes",
        "rank_sizes.scaler",
        "rank_sizes.named:ZBV",
        f"rank_meta.meta:{shards_of_gpt2(folder / 'gpt2')}:{folder / 'meta'}",
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


def test_every_plan_for_a_cluster_runs(ranks):
    assert_passed(ranks, "kinds of plans ran, replicas [1, 2]")


def test_clipping_and_checkpoints(ranks):
    assert_passed(ranks, "clipping ok", "checkpoints ok")


def test_batches_of_any_size_and_place_and_a_scaler(ranks):
    assert_passed(
        ranks, "shorter 1F1B ok", "shorter ZBV ok", "shorter ok", "axes ok", "scaler ok", "named ok"
    )


def test_each_rank_loads_its_own_from_shards(ranks):
    assert_passed(ranks, "meta ok")


@pytest.mark.full
def test_autocast_in_every_schedule():
    assert_passed(launch("autocast:mlp", "autocast:gpt2", worker=WORKER), "autocast mlp ok", "gpt2 ok")


@pytest.mark.full
def test_recomputation_in_every_schedule():
    assert_passed(launch("recomputing:resnet", worker=WORKER), "recomputing resnet ok")


@pytest.mark.full
def test_every_plan_of_a_grid_runs():
    assert_passed(launch("plans:1:2:3:4:6:8", worker=WORKER), "plans ok")

"""Two processes on the loopback device: every schedule gives the plain model's loss and gradients.

Also autocast, losses that average over tokens, recomputation, faults, checkpoints, one row of the matrix.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pipeline_zoo import make
from rank_launch import assert_passed, launch
from rank_worker import SCHEDULES
from test_matrix import checked_rows
from test_meta_load import shards
from torch import nn

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.split import split

pytestmark = pytest.mark.slow


def shards_of_gpt2(folder: Path) -> Path:
    """A folder of weights, without the name that is tied to another."""
    state = make("gpt2")[0].state_dict()
    return shards(folder, {k: v for k, v in state.items() if k != "lm_head.weight"}, 3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[tuple[int, str]]:
    """What both processes printed: starting a pair costs more than a case, so one pair runs them all."""
    folder = tmp_path_factory.mktemp("ranks")
    return launch(
        "rank_worker.same_as_plain:gpt2:GPipe:ZBV",
        "rank_worker.same_as_plain:unet:1F1B:DualPipeV",
        "rank_worker.same_as_plain:t5:ZeroBubble",
        "rank_worker.same_as_plain:llama:Interleaved1F1B",
        "rank_worker.odd",
        "rank_worker.lengths",
        "rank_worker.refusals",
        "rank_worker.trains",
        "rank_tree.decides:1F1B:ZBV",
        "rank_tree.structures",
        "rank_tree.refusals",
        "rank_tree.opt",
        "rank_tree.compiled",
        "rank_training.autocast:mlp:1F1B:ZBV",
        "rank_training.autocast_on_one_rank",
        "rank_training.token_means",
        "rank_training.loss_inside",
        "rank_training.recomputing:resnet:1F1B:DualPipeV",
        "rank_training.raises",
        "rank_training.bad_loss",
        "rank_training.plans:4",
        "rank_plans.clusters",
        "rank_schedules.deferred",
        "rank_training.clipping",
        f"rank_training.checkpoints:{folder / 'saved'}",
        f"rank_states.optimizers:{folder / 'optimizers'}",
        "rank_states.as_module",
        "rank_states.norms",
        "rank_states.overflows",
        "rank_states.unused",
        "rank_states.agreements",
        "rank_sizes.shorter:1F1B:ZBV",
        "rank_sizes.axes",
        "rank_sizes.scaler",
        "rank_sizes.named:ZBV",
        f"rank_meta.meta:{shards_of_gpt2(folder / 'gpt2')}:{folder / 'meta'}",
        # ALBERT's layers share their weights: torch's separate pass for them fails there.
        "rank_matrix.sample:albert",
        fork=False,
    )


def test_every_schedule_equals_the_plain_model(ranks):
    words = [f"odd {schedule} ok" for schedule in SCHEDULES]
    assert_passed(ranks, *words, "gpt2 GPipe ok", "gpt2 ZBV ok", "unet DualPipeV ok")


def test_models_with_shared_tables_and_rotary_buffers(ranks):
    assert_passed(ranks, "t5 ZeroBubble ok", "llama Interleaved1F1B ok")


def test_where_plain_use_goes_wrong(ranks):
    assert_passed(ranks, "lengths ok", "refusals ok", "trains ok")


def test_models_that_no_graph_holds_cut_between_their_modules(ranks):
    assert_passed(ranks, "decides 1F1B ok", "decides ZBV ok", "structures ok", "tree refusals ok", "opt ok")


def test_compiled_stages(ranks):
    pytest.importorskip("onnxruntime")
    assert_passed(ranks, "compiled ok")


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


def test_what_training_keeps_is_the_plain_loops(ranks):
    assert_passed(
        ranks, "optimizers ok", "as_module ok", "norms ok", "overflows ok", "unused ok", "agreements ok"
    )


def test_batches_of_any_size_and_place_and_a_scaler(ranks):
    assert_passed(
        ranks, "shorter 1F1B ok", "shorter ZBV ok", "shorter ok", "axes ok", "scaler ok", "named ok"
    )


def test_each_rank_loads_its_own_from_shards(ranks):
    assert_passed(ranks, "meta ok")


def test_an_architecture_of_the_matrix(ranks):
    rows = checked_rows(ranks)
    assert {(r["schedule"], r["checkpoint"], r["autocast"]) for r in rows} == {
        (s, c, c) for s in ("1F1B", "ZeroBubble") for c in (False, True)
    }


@pytest.mark.full
def test_autocast_in_every_schedule():
    assert_passed(
        launch("rank_training.autocast:mlp", "rank_training.autocast:gpt2"), "autocast mlp ok", "gpt2 ok"
    )


@pytest.mark.full
def test_recomputation_in_every_schedule():
    assert_passed(launch("rank_training.recomputing:resnet"), "recomputing resnet ok")


@pytest.mark.full
def test_every_plan_of_a_grid_runs():
    assert_passed(launch("rank_training.plans:1:2:3:4:6:8"), "plans ok")


@pytest.mark.full
def test_more_schedules_of_these_models():
    cases = [f"rank_worker.same_as_plain:{name}" for name in ("gpt2", "unet", "t5", "llama")]
    words = [f"gpt2 {schedule} ok" for schedule in SCHEDULES]
    assert_passed(
        launch(*cases, "rank_tree.decides", fork=False),
        *words,
        "unet ZBV ok",
        "t5 DualPipeV ok",
        "llama ZBV ok",
    )


@pytest.mark.full
def test_a_killed_rank_ends_the_other_with_a_clear_error():
    (first, output), (second, _) = launch("rank_worker.killed")
    assert first == 0 and "killed ok" in output, output
    assert second == 9


def test_without_a_process_group():
    parts = split(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.randn(2, 2),), stages=2, by="memory"
    )
    with pytest.raises(PartitionError, match="run under torchrun"):
        parts.distributed()
    with pytest.raises(InputError, match="distributed has no option 'los_fn'; did you mean 'loss_fn'"):
        parts.distributed("1F1B", 2, los_fn=nn.MSELoss())


@pytest.mark.slow
def test_the_rank_that_holds_the_store_lets_the_others_read_who_died():
    (first, told), _, (third, also) = launch("rank_worker.killed_of_three", world=3)
    assert first == third == 0 and "killed ok" in told and "killed ok" in also, told + also

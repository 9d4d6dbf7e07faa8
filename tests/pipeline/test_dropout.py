"""Models with dropout train in a pipeline as in a plain loop: schedules, ranks, meshes, recomputation."""

from __future__ import annotations

import json

import pytest
from dropout_table import MODELS, every_way, on_ranks, resumed
from pipeline_compare import one_thread  # noqa: F401  (a fixture)
from rank_dropout import gpipe_run
from rank_launch import launch


def assert_equal(rows):
    for name, row in rows.items():
        assert row["loss"] < 2e-6 and row["weight"] < 1e-5, (name, row)


def test_gpt_on_workers():
    assert_equal({"gpt": gpipe_run("gpt", 4, "always", names=True)})


def test_ranks_with_one_seed_draw_different_masks():
    """Two layers that each keep a half keep a quarter; with the same mask twice it would be a half."""
    for status, output in launch("rank_dropout.masks"):
        assert status == 0, output
        assert 0.2 < json.loads(output.splitlines()[-1])["share"] < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["schedule:1F1B", "recompute:ZeroBubble", "schedule:ZBV"])
def test_two_ranks(way):
    assert_equal(on_ranks(way, 2, *MODELS))


@pytest.mark.slow
def test_two_replicas_of_two_stages():
    assert_equal(on_ranks("mesh:", 4, *MODELS))


@pytest.mark.slow
def test_three_ranks_resume_what_two_saved():
    assert_equal(resumed(*MODELS))


@pytest.mark.slow
def test_two_stages_of_two_shards_each():
    """torch's FSDP2 inside of stages; ties across stages are refused, and the other two models have some."""
    assert_equal(on_ranks("shard:", 4, "vit"))
    assert_equal(resumed("vit", save="shardsave", saving=4))
    assert_equal(resumed("vit", resume="shardresume", world=4))
    for _, output in launch("rank_dropout.trained:shard::gpt", world=4):
        assert "fully_shard cannot shard one parameter in two modules" in output, output


@pytest.mark.full
def test_every_way():
    for way, run in every_way():
        rows = run()
        print(way, rows)
        assert_equal(rows)

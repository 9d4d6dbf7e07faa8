"""Replicas of a pipeline on a mesh of (data, pipeline), on four processes, against the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_distributed import assert_passed, launch

WORKER = Path(__file__).with_name("rank_mesh.py")


def test_two_replicas_of_two_stages_train_as_the_plain_model(tmp_path):
    cases = ["mesh_gradients", f"mesh_refusals:{tmp_path / 'saved'}", "mesh_trains:tied"]
    words = ("mesh_gradients ok", "mesh_refusals ok", "mesh_trains tied ok")
    assert_passed(launch(*cases, worker=WORKER, world=4, fork=True), *words)


@pytest.mark.full
def test_gpt2_on_a_mesh():
    assert_passed(launch("mesh_trains:gpt2", worker=WORKER, world=4, fork=True), "mesh_trains gpt2 ok")

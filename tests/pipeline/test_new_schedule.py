"""A schedule is one generator in one file: it is run, simulated, planned, drawn and listed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch
from rank_launch import assert_passed, launch
from torch import nn
from typer.testing import CliRunner

from intarsia.cli.pipeline import app
from intarsia.errors import PartitionError
from intarsia.pipeline import (
    SCHEDULES,
    Action,
    Cluster,
    Slot,
    ascii_gantt,
    define_schedule,
    plan_pipeline,
    schedule,
    simulate,
)
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.schedules import slot_table

FILE = Path(__file__).resolve().parents[2] / "examples" / "own_schedule.py"
NAME = "LastInFirstOut"


@pytest.fixture(autouse=True)
def own_schedule():
    SCHEDULES.pop(NAME, None)  # the page on pipelines defines it, too
    run_path(str(FILE))
    yield
    SCHEDULES.pop(NAME, None)


def test_it_is_simulated_and_drawn():
    plan = schedule(NAME, 2, 3)
    assert str(plan) == "rank 0: 0F0 0F1 0F2 0B2 0B1 0B0\nrank 1: 1F0 1F1 1F2 1B2 1B1 1B0"
    played = simulate(plan, [Cost(1.0, 1.0, 0.0, saved=5)] * 2)
    assert played.step_time == 8.0 and played.peak_memory == (15, 15)
    assert ascii_gantt(plan).splitlines()[0] == "rank 0 |F0|F1|F2|  |  |  |B2   |B1   |B0   |"


def test_it_is_planned_on_devices_and_on_a_cluster():
    model, x = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), torch.randn(8, 16)
    plan = plan_pipeline(model, (x,), devices=2, microbatches=[2, 4])
    assert {c.schedule for c in plan.candidates} == set(SCHEDULES)
    cluster = Cluster.of({"devices": 2, "memory": 10**9, "link": {"bandwidth": 1e15}})
    plan = plan_pipeline(model, (x,), cluster=cluster, schedules=[NAME])
    assert plan.choice.schedule == NAME and len(plan.stages) == plan.layout.ranks


def test_it_is_listed_and_drawn_in_the_command_line():
    SCHEDULES.pop(NAME)
    listed = CliRunner().invoke(app, ["schedules", "--import", str(FILE)])
    assert listed.exit_code == 0 and f"{NAME} " in listed.output and "ZeroBubble" in listed.output
    drawn = CliRunner().invoke(app, ["draw", "--schedule", NAME, "--ranks", "2", "--microbatches", "3"])
    assert drawn.output.strip() == ascii_gantt(schedule(NAME, 2, 3))


def test_it_runs_over_processes_with_the_plain_gradients():
    """So do the others in the order of their generators, though torch has classes of its own for those."""
    assert_passed(launch("rank_schedules.own_order"), *(f"{n} ok" for n in [NAME, *SCHEDULES]))


@pytest.mark.slow
def test_it_runs_from_the_command_line():
    options = [
        "--import",
        str(FILE),
        "--schedule",
        NAME,
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--steps",
        "1",
    ]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(FILE.parents[1] / "src")]))
    here = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    here.pop("RANK", None)
    command = [sys.executable, "-m", "intarsia", "pipeline", "run", *options]
    ran = subprocess.run(command, env=here, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0 and "gradients equal the plain model's" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        ([], "runs the forward pass of stage 0 on micro-batch 0 0 times"),
        ([Slot(0, Action.FORWARD, 0)], "runs the backward pass of stage 0 on micro-batch 0 0 times"),
        (
            [Slot(0, Action.BACKWARD, 0), Slot(0, Action.FORWARD, 0)],
            "stage 0 on micro-batch 0 before a pass",
        ),
        ([Slot(1, Action.FORWARD, 0)], "runs 1F0 on rank 0; stage 1 is on rank 1"),
        ([Slot(0, Action.FORWARD, 1)], "runs 0F1 on rank 0; there are 2 stages and 1 micro-batches"),
        (
            itertools.repeat(Slot(0, Action.FORWARD, 0)),
            "forward pass of stage 0 on micro-batch 0 4 times",
        ),
    ],
)
def test_a_wrong_order_is_refused(slots, sentence):
    @define_schedule("Wrong")
    def wrong(rank, ranks, microbatches, per_rank):
        yield from (Slot(s.stage + rank, s.action, s.microbatch) for s in slots)

    try:
        for checked in (schedule, slot_table):  # what runs, and what is planned
            with pytest.raises(PartitionError, match=sentence):
                checked("Wrong", 2, 1)
        with pytest.raises(PartitionError, match="schedule='Wrong' is defined already"):
            define_schedule("Wrong")(lambda *_: iter(()))
    finally:
        SCHEDULES.pop("Wrong")

"""Replicas of a pipeline on a mesh of (data, pipeline), and ranks that die: named by all, restarted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_launch import assert_passed, environment, launch
from restart_job import make
from torch.nn import functional as F

from intarsia.pipeline.distributed import world
from intarsia.pipeline.distributed.saved import latest_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("restart_job.py")


def assert_named(victim: int, ranks: list[tuple[int, str]]) -> None:
    for rank, (status, output) in enumerate(ranks):
        if rank == victim:
            assert status == 9, output
        else:
            assert status == 0 and "dies ok after" in output, output


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[tuple[int, str]]:
    """What four processes printed, two replicas of two stages; the second dies in the last case."""
    saved = tmp_path_factory.mktemp("mesh") / "saved"
    cases = ("mesh_gradients", f"mesh_refusals:{saved}", "mesh_trains:tied", "dies:1")
    return launch(*(f"rank_mesh.{case}" for case in cases), world=4)


def test_two_replicas_of_two_stages_train_as_the_plain_model(ranks):
    for _, output in ranks:
        for words in ("mesh_gradients ok", "mesh_refusals ok", "mesh_trains tied ok"):
            assert words in output, output


def test_stages_whose_modules_are_divided_over_ranks(tmp_path):
    """torch's parallelize_module inside of stages: losses, norms and weights of the plain loop."""
    cases = ("rank_tensor.tensor_refusals", f"rank_tensor.tensor_trains:pipeline+tensor:{tmp_path}")
    assert_passed(launch(*cases, world=4), "refusals ok", "pipeline+tensor ok")


@pytest.mark.full
def test_replicas_of_stages_whose_modules_are_divided(tmp_path):
    assert_passed(launch(f"rank_tensor.tensor_trains:data+pipeline+tensor:{tmp_path}", world=8), "ok")


@pytest.mark.full
def test_gpt2_on_a_mesh():
    assert_passed(launch("rank_mesh.mesh_trains:gpt2", world=4), "mesh_trains gpt2 ok")


def test_the_rank_that_died_is_named_by_all_others(ranks):
    assert_named(1, ranks)


@pytest.mark.full
@pytest.mark.parametrize(("victim", "world"), [(0, 2), (0, 3), (1, 3), (3, 4), (2, 4)])
def test_whichever_rank_died(victim, world):
    assert_named(victim, launch(f"rank_mesh.dies:{victim}", world=world))


def torchrun(*words: str, cwd: Path) -> str:
    """What a job of torchrun prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    pipe, env = subprocess.PIPE, environment()
    job = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = job.communicate()
    finally:
        if job.poll() is None:  # its ranks with it
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, output
    return output


def test_a_restart_under_torchrun_goes_on_from_the_last_checkpoint(tmp_path):
    steps = 7
    torchrun("--nproc_per_node=2", "--max-restarts=1", str(JOB), str(tmp_path), str(steps), "1", cwd=tmp_path)
    lives = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert [int(life) for life, _, _ in lives] == [0] * 3 + [1] * 5
    assert [int(step) for _, step, _ in lives] == [0, 1, 2, 2, 3, 4, 5, 6]
    model, options, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    want = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch(step)), batch(step))
        loss.backward()
        optimizer.step()
        want[step] = loss.item()
    for _, step, loss in lives:
        assert float(loss) == pytest.approx(want[int(step)], rel=1e-5)
    assert lives[2][2] == lives[3][2]  # the step that was done again, to the last bit
    assert latest_checkpoint(tmp_path / "saved").name == "6"
    (tmp_path / "saved" / "6" / ".metadata").unlink()  # as if the job had died while saving
    assert latest_checkpoint(tmp_path / "saved").name == "4"


def test_the_scripts_of_the_page_run_by_their_commands(tmp_path):
    page = (ROOT / "docs" / "pipeline_processes.md").read_text()
    scripts = {name: block for block, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page, re.S)}
    commands = re.findall(r"^torchrun --nproc_per_node (\d) (\w+\.py)(?: (\w+))?", page, re.M)
    assert {name for _, name, _ in commands} == scripts.keys()
    for ranks, name, argument in commands:
        script = tmp_path / name
        script.write_text(scripts[name])
        if name == "train.py":
            output = torchrun("--nproc_per_node", ranks, str(script), cwd=tmp_path)
        else:  # on ranks that know torch already, with the same variables
            results = launch(f"{script}:{argument}", world=int(ranks))
            assert_passed(results)
            output = "".join(printed for _, printed in results)
        assert re.search(r"loss \d", output), output


def test_torch_still_has_the_store():
    assert callable(world.distributed_c10d._get_default_store)

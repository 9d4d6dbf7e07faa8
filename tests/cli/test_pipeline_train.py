"""`intarsia pipeline run` trains a user's model over two processes, and goes on from its checkpoint."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_pipeline import environment
from torch import nn
from typer.testing import CliRunner

from intarsia.cli.pipeline import app
from intarsia.cli.pipeline_train import job_of
from intarsia.drawing import text_curve
from intarsia.errors import InputError

pytestmark = pytest.mark.slow

SIZES = "n_layer=2,n_embd=16,n_head=2,n_positions=16,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*options: str, folder: Path) -> str:
    command = [sys.executable, "-m", "intarsia.cli.pipeline", "run", *options, "--microbatches=2"]
    done = subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain_losses(name: str, steps: int, **options) -> list[float]:
    """The losses of the plain loop."""
    job = job_of(name, **options)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        batch = job.data(step)
        loss = job.loss(job.model(*batch.args, **batch.kwargs), batch.target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_gpt2_is_trained_saved_and_resumed(tmp_path, monkeypatch, capfd):
    model = f"gpt2:{SIZES}"
    options = [model, "--batch=4", "--length=16", "--save=run", "--every=2"]
    # First in this process, one rank; what it saves is gone on with by two.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    monkeypatch.chdir(tmp_path)
    for key, value in (alone | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(key, value)
    first = CliRunner().invoke(app, ["run", *options, "--steps=3", "--microbatches=2"])
    assert first.exit_code == 0 and "step     3/3" in first.output, first
    for key in (*alone, "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key)
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    again = CliRunner().invoke(
        app, ["run", *options, "--steps=5", "--resume", "--curve=loss.svg", "--microbatches=2"]
    )
    told = capfd.readouterr().out  # the ranks are processes of their own
    assert again.exit_code == 0, told
    assert "continues after step 3" in told and "wrote loss.svg" in told and " |*" in told
    assert "loss over 5 steps" in (tmp_path / "loss.svg").read_text(encoding="utf-8")
    latest = json.loads((tmp_path / "run" / "latest.json").read_text(encoding="utf-8"))
    # The plain loop without an interruption.
    assert latest["losses"] == pytest.approx(plain_losses(model, 5, batch=4, length=16), rel=1e-4)
    assert latest["checkpoint"] == "step-5"
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["step-5"]  # older ones are gone


FAULTY = """
import os, signal, sys
sys.path.insert(0, {examples!r})
from own_model import make as plain

def make():
    model, data, loss = plain()
    def faulty(step):
        if step == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return data(step)
    return model, faulty, loss
"""


@pytest.mark.full
def test_a_rank_that_dies_is_begun_anew_by_torchrun(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY.format(examples=str(EXAMPLES)), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--max-restarts=1", "-m", "intarsia.cli.pipeline", "run", "faulty.py:make", "--steps=5"]
    command += ["--save=run", "--every=2", "--microbatches=2", "--timeout=30"]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after step 2" in done.stdout
    latest = json.loads((tmp_path / "run" / "latest.json").read_text(encoding="utf-8"))
    want = plain_losses(f"{EXAMPLES / 'own_model.py'}:make", 5)
    assert latest["losses"] == pytest.approx(want, rel=1e-4)


@pytest.mark.full
def test_a_model_of_the_users_own_is_trained(tmp_path):
    name = f"{EXAMPLES / 'own_model.py'}:make"
    told = run(name, "--steps=4", "--save=run", "--recompute", "--schedule=ZeroBubble", folder=tmp_path)
    assert re.search(r"step +4/4  loss \d", told)
    latest = json.loads((tmp_path / "run" / "latest.json").read_text(encoding="utf-8"))
    assert latest["losses"] == pytest.approx(plain_losses(name, 4), rel=1e-4)


def test_names_of_models(tmp_path, monkeypatch):
    job = job_of(f"{EXAMPLES / 'own_model.py'}:make")
    batch = job.data(3)
    assert batch.args[0].shape == (32, 32) and job.loss_weight is None
    assert torch.equal(batch.args[0], job.data(3).args[0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_pipeline.py").write_text(
        "from torch import nn\nnumber = 3\ndef none():\n    return 3\ndef bytes_model():\n"
        "    return nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))\n"
    )
    job = job_of("mine_for_pipeline:bytes_model", batch=2, length=8)
    assert isinstance(job.model, nn.Module) and job.data(0).args[0].shape == (2, 8)
    assert not torch.equal(job.data(0).target, job.data(1).target)
    for name, sentence in (
        ("mine_for_pipeline:number", "has no function .number"),
        ("mine_for_pipeline:none", r"must return \(model, data, loss\) or a model, not int"),
        ("nowhere_at_all:make", "there is no module 'nowhere_at_all'"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("gpt3", "'gpt3' is not a model type of Hugging Face"),
        ("gpt2:layers=3", "the configuration of gpt2 has no 'layers'"),
        ("gpt2:n_layer=1,n_embd=8,n_head=2,vocab_size=100", "a text of bytes needs vocab_size=256"),
    ):
        with pytest.raises(InputError, match=sentence):
            job_of(name)
    small = "gpt2:n_layer=1,n_embd=8,n_head=2,n_positions=32"
    for options, sentence in (
        ({"length": 64}, "--length=64 is more than the 32 positions"),
        ({"text": tmp_path / "none.txt", "length": 8}, "cannot be read"),
        ({"text": tmp_path / "mine_for_pipeline.py", "length": 32}, None),
    ):
        if sentence is None:
            assert job_of(small, **options).data(0).args[0].shape == (16, 32)
            continue
        with pytest.raises(InputError, match=sentence):
            job_of(small, **options)


def test_a_curve_is_a_picture(tmp_path):
    result = CliRunner().invoke(app, ["run", "gpt2", f"--curve={tmp_path / 'loss.txt'}"])
    assert result.exit_code and "give a name that ends in .svg, .png, .pdf" in str(result.exception)


def test_curves():
    many = [math.exp(-i / 50) for i in range(300)]
    text = text_curve(many, width=40, height=8).splitlines()
    assert len(text) == 8 and max(map(len, text)) <= 40 + 7
    assert text_curve([]) == text_curve([float("nan")]) == "no losses"

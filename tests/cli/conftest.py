"""The command line, and models that its commands are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.command import Command

MODELS = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(2, 4),)


def varies():
    import intarsia

    return make()[0], (intarsia.Input(min_shape=(1, 4), opt_shape=(2, 4), max_shape=(9, 4)),)


def only_model():
    return nn.Linear(4, 8)


def tensor_as_args():
    return nn.Linear(4, 8), torch.randn(2, 4)


def list_as_kwargs():
    return nn.Linear(4, 8), (torch.randn(2, 4),), []


def raises():
    raise ValueError("no such checkpoint")


def same(model):
    return model


def wrong_shape():
    return nn.Linear(4, 8), (torch.randn(2, 5),)
"""


@pytest.fixture
def intarsia(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file of models in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    return "models.py"

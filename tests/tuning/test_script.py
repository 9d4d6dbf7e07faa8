"""`intarsia tune script.py`: a script nobody edits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from intarsia.cli.main import app

SCRIPT = """
import sys
import torch
from torch import nn

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)

torch.manual_seed(0)
model = Counts().eval()
with torch.no_grad():
    total = sum(model(torch.full((size, 64), 0.5)).sum().item() for size in (2, 3, 4, 5, 3, 4, 5, 2, 4, 3))
print(f"{sys.argv[1:]} {model.calls} {total:.3f}")
sys.exit(3)
"""


def test_a_script_is_run_as_it_is_and_its_modules_are_compiled(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    argv = list(sys.argv)
    made = CliRunner().invoke(app, ["tune", "--always", "--after", "2", str(script), "--loud", "a"])
    assert made.exit_code == 3, made.output
    assert "['--loud', 'a'] 10 " in made.output
    assert (
        "Counts 1 stays as it is" in made.output and "calls, which a run of the model changes" in made.output
    )
    assert "Counts 1.inner took" in made.output
    assert sys.argv == argv
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


def test_the_answer_is_the_scripts_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("sys.exit(3)", ""))
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    plain = capsys.readouterr().out.split()[-1]
    made = CliRunner().invoke(app, ["tune", "--always", str(script)])
    assert made.exit_code == 0 and f"10 {plain}" in made.output


def test_a_script_that_is_not_there_is_told() -> None:
    made = CliRunner().invoke(app, ["tune", "nowhere.py"])
    assert "there is no script 'nowhere.py'" in str(made.exception)

"""The scripts in examples/ run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("check_onnx.py", "first difference: layer_norm (aten.layer_norm.default)"),
        ("hugging_face_encoder.py", "intarsia "),
    ],
)
def test_a_script_runs(name: str, printed: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "INTARSIA_MEASURE": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout

"""The scripts in examples/ run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = {
    "check_onnx.py": ("onnxscript", "onnxruntime"),
    "hugging_face_encoder.py": ("transformers",),
    "serve_model.py": ("fastapi",),
    "tune_diffusers.py": ("diffusers",),
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("check_onnx.py", "first difference: layer_norm (aten.layer_norm.default)"),
        ("converter.py", "aten.special_spherical_bessel_j0.default"),
        ("fusion.py", "becomes"),
        ("hugging_face_encoder.py", "intarsia "),
        ("pipeline_model.py", "loss "),
        ("serve_model.py", "the server answers [["),
        ("tune_diffusers.py", "compiled modules: 1"),
    ],
)
def test_a_script_runs(name: str, printed: str, tmp_path: Path) -> None:
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
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

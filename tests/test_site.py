"""The documentation site builds without a warning: every link has a page, every reference an object."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "compiling" / "index.html").read_text()
    assert 'id="intarsia.compiler.api.compile"' in reference
    assert "<blockquote" not in reference  # an example in a docstring that was taken for a quotation

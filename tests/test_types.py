"""Users' type checkers see the types of what the package exports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright", reason="pyright, of the extra dev, measures it")


@pytest.mark.slow
def test_at_least_95_percent_of_what_is_exported_has_a_known_type() -> None:
    # With --verifytypes, pyright 1.1.414 asks the first `python` of PATH where packages are.
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--verifytypes",
        "intarsia",
        "--ignoreexternal",
    ]
    environment = {**os.environ, "PATH": folders}
    verified = subprocess.run(command, capture_output=True, text=True, env=environment)
    report = json.loads(verified.stdout)["typeCompleteness"]
    unknown = [symbol["name"] for symbol in report["symbols"] if not symbol["isTypeKnown"]]
    assert report["completenessScore"] >= 0.95, unknown[:50]

"""Users' type checkers see the types of what the package exports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("pyright", reason="pyright, of the extra dev, measures it")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_least_95_percent_of_what_is_exported_has_a_known_type() -> None:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    verified = subprocess.run(
        [*command, "--verifytypes", "intarsia", "--ignoreexternal"], capture_output=True, text=True
    )
    report = json.loads(verified.stdout)["typeCompleteness"]
    unknown = [symbol["name"] for symbol in report["symbols"] if not symbol["isTypeKnown"]]
    assert report["completenessScore"] >= 0.95, unknown[:50]

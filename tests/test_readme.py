"""The README's worked example prints what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest


@pytest.mark.openvino
def test_worked_example() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code, expected = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.S).groups()  # type: ignore[union-attr]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "readme"})
    assert printed.getvalue() == expected

"""The example in docs/generation.md prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path


def test_example() -> None:
    text = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    code, expected = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.S).groups()  # type: ignore[union-attr]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "generation"})
    assert printed.getvalue() == expected

"""The examples in docs/generation.md print what they say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    text = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    examples = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.S)
    assert len(examples) == 3
    for code, expected in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "generation"})
        assert printed.getvalue() == expected

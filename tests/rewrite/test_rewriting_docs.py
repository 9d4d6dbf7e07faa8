"""What docs/rewriting.md shows is what happens."""

from __future__ import annotations

import doctest
from pathlib import Path

from intarsia.rewrite import FUSIONS

PAGE = Path(__file__).parents[2] / "docs" / "rewriting.md"


def test_the_page_runs() -> None:
    failed, tried = doctest.testfile(
        str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert tried > 30 and failed == 0


def test_every_shipped_pattern_is_listed() -> None:
    text = PAGE.read_text()
    assert [name for name in FUSIONS if f"`{name}`" not in text] == []

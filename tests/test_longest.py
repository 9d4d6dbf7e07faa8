"""The files that are begun first."""

from __future__ import annotations

from pathlib import Path

from tests.longest import LONGEST


def test_the_longest_files_are_there() -> None:
    root = Path(__file__).parents[1]
    assert [name for name in LONGEST if not (root / name).is_file()] == []

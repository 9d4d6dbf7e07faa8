"""The page on writing converters says what happens."""

from __future__ import annotations

import doctest
from pathlib import Path

import intarsia.lower  # noqa: F401
from intarsia.convert import registry
from intarsia.convert.evaluators import EVALUATORS

PAGE = Path(__file__).parents[2] / "docs" / "converters.md"


def test_the_page_runs() -> None:
    evaluators = dict(EVALUATORS)
    try:
        with registry.override():
            # `torch.library` keeps a library as long as it is referred to; the page's names go with it.
            failed, tried = doctest.testfile(
                str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
            )
    finally:
        EVALUATORS.clear()
        EVALUATORS.update(evaluators)
    assert tried > 30
    assert failed == 0

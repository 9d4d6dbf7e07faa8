"""Searches without the rests between their turns: tests have one thread, and nobody's threads spin on."""

from __future__ import annotations

import pytest

from intarsia.choose import load


@pytest.fixture(autouse=True)
def no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PAUSE_S", 0.0)

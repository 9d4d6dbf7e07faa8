"""Searches without the rests between their turns: tests have one thread, and nobody's threads spin on."""

from __future__ import annotations

import pytest

from intarsia.choose import race


@pytest.fixture(autouse=True)
def no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "PAUSE_S", 0.0)

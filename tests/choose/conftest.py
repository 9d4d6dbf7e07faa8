"""Searches without the rests between their turns: tests have one thread, and nobody's threads spin on."""

from __future__ import annotations

import pytest

from intarsia.choose import race, search


@pytest.fixture(autouse=True)
def no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "PAUSE_S", 0.0)


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget there is time for all plans: a busy machine may have none for the second engine."""
    monkeypatch.setattr(search, "_AGAIN", 1e6)

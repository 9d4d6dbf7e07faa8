"""One directory for all that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from intarsia.cache.store import cache_directory
from intarsia.pipeline.balance.profile import cache_path
from intarsia.rewrite.apply import cache_file


def test_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    assert cache_path() == tmp_path / "profiles.json"
    assert cache_file() == tmp_path / "rewrite.json"


def test_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTARSIA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "intarsia"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "intarsia"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("INTARSIA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory().name.startswith("intarsia-")

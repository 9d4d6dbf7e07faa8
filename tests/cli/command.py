"""The command line as a user calls it, in this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from intarsia.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


class Command:
    """Calls the entry point with words; `good` also asserts that it succeeds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["intarsia", *map(str, words)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:  # any other exception would be a traceback
            main()
        printed = self._capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    def good(self, *words: object) -> str:
        outcome = self(*words)
        assert outcome.code == 0, outcome.err
        return outcome.out

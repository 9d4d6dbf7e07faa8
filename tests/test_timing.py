"""Races: turns, peers that are far behind, peers that fail, budgets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from intarsia.timing import race

Clock = Callable[[float], None]


def _taking(clock: Clock, seconds: float, name: str, log: list[str]) -> Callable[[], None]:
    def call() -> None:
        log.append(name)
        clock(seconds)

    return call


def test_every_round_has_everybody_in_another_order(clock: Clock) -> None:
    """Nobody always comes after the same peer, whose threads may spin on; two races take the same turns."""
    log: list[str] = []
    race({name: _taking(clock, 0.003, name, log) for name in "abc"}, rounds=30, warmup=0, budget_s=10)
    turns = "".join(log[-90:])
    rounds = [turns[at : at + 3] for at in range(0, 90, 3)]
    assert all(sorted(one) == list("abc") for one in rounds) and len({*rounds}) == 6
    again: list[str] = []
    race({name: _taking(clock, 0.003, name, again) for name in "abc"}, rounds=30, warmup=0, budget_s=10)
    assert again == log


def test_who_is_far_behind_leaves(clock: Clock) -> None:
    log: list[str] = []
    peers = {"quick": _taking(clock, 0.01, "quick", log), "slow": _taking(clock, 0.3, "slow", log)}
    took = race(peers, rounds=5, warmup=0, budget_s=20, drop=3.0)
    assert took["quick"].rounds == 5 and took["slow"].rounds == 2
    took = race(peers, rounds=5, warmup=1, budget_s=20, drop=3.0)  # a long call to warm up is the other one
    assert took["quick"].rounds == 5 and took["slow"].rounds == 1


def test_who_fails_leaves_and_is_told() -> None:
    def fails() -> None:
        raise MemoryError("no more")

    failed: dict[str, Exception] = {}
    took = race({"a": lambda: None, "b": fails}, rounds=2, warmup=1, failed=failed)
    assert list(took) == ["a"] and str(failed["b"]) == "no more"
    with pytest.raises(MemoryError):
        race({"a": lambda: None, "b": fails}, rounds=2, warmup=1)


def test_a_round_that_does_not_fit_does_not_begin(clock: Clock) -> None:
    log: list[str] = []
    took = race({"a": _taking(clock, 0.3, "a", log)}, rounds=30, warmup=1, least=1, budget_s=1.0)
    assert took["a"].rounds < 4 and len(log) <= 4


def test_nobody_races() -> None:
    assert race({}) == {}


def test_warming_up_does_not_make_rounds_dear(clock: Clock) -> None:
    """Four peers of 0.2 s: a round takes less than a second, so three are run on a spent budget."""
    took = race(dict.fromkeys("abcd", _taking(clock, 0.2, "", [])), least=1, budget_s=0.0, warmup=1)
    assert [one.rounds for one in took.values()] == [3] * 4

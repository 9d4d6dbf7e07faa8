"""Counts of verdicts for every op, dtype and engine, kept as JSON so that a run can be continued."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.commit import commit
from tests.convert import drivers
from tests.convert.harness import REFUSED, RUNS, WRONG, judge
from tests.convert.samples import DTYPES, LIMIT, cases, dtypes_of, op_infos

Key = tuple[str, str, str]  # op, dtype, engine


@dataclass
class Tally:
    """Samples of the op itself (`own`), and of operators found in its decomposition (`core`)."""

    own: Counter[str] = field(default_factory=Counter)
    core: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    limit: int = 0  # samples that were asked for; an op may have fewer
    commit: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "own": dict(self.own),
            "core": dict(self.core),
            "reasons": dict(self.reasons),
            "wrong": self.wrong,
            "limit": self.limit,
            "commit": self.commit,
        }

    @staticmethod
    def of(data: dict[str, Any]) -> Tally:
        counts = (Counter(data[name]) for name in ("own", "core", "reasons"))
        return Tally(*counts, data["wrong"], data["limit"], data["commit"])


def measure(name: str, dtype: str, engines: Iterable[str], core: int, limit: int) -> dict[Key, Tally]:
    """One op and dtype on each engine."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tallies = {(name, dtype, engine): Tally(limit=limit, commit=commit()) for engine in engines}
    for case in cases(name, dtype, core=core, limit=limit, seen=_seen):
        for engine in engines:
            outcome = judge(case, engine)
            tally = tallies[name, dtype, engine]
            (tally.own if case.level == "composite" else tally.core)[outcome.verdict] += 1
            if outcome.verdict == REFUSED:
                tally.reasons[f"{case.target}: {outcome.reason}"] += 1
            elif outcome.verdict == WRONG:
                tally.wrong.append(f"{case}: {outcome.reason}")
    return tallies


_seen: set[str] = set()  # operators of decompositions already judged in this process


def measure_all(
    names: Iterable[str],
    dtypes: Iterable[str],
    engines: Iterable[str] = drivers.ENGINES,
    *,
    core: int = LIMIT,
    limit: int | Mapping[str, int] = LIMIT,
    jobs: int = 1,
    keep: Path | None = None,
) -> dict[Key, Tally]:
    """All ops and dtypes, those found in `keep` taken from there; `limit` may differ between dtypes."""
    found = load(keep) if keep is not None and keep.exists() else {}
    engines = tuple(engines)
    wanted = [
        (name, dtype)
        for dtype in dtypes
        for name in names
        if dtype in dtypes_of(op_infos()[name]) and (name, dtype, engines[0]) not in found
    ]
    limits = dict.fromkeys(DTYPES, limit) if isinstance(limit, int) else limit
    if jobs == 1:
        for name, dtype in wanted:
            found.update(measure(name, dtype, engines, core, limits[dtype]))
            if keep is not None:
                save(found, keep)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            futures = [
                pool.submit(measure, name, dtype, engines, core, limits[dtype]) for name, dtype in wanted
            ]
            for future in futures:
                found.update(future.result())
                if keep is not None:
                    save(found, keep)
    return found


def save(tallies: dict[Key, Tally], path: Path) -> None:
    """Written whole or not at all, since a run may be stopped at any time."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(
        json.dumps({"|".join(key): tally.to_json() for key, tally in tallies.items()}, indent=0)
    )
    partial.replace(path)


def load(path: Path) -> dict[Key, Tally]:
    data = json.loads(path.read_text())
    return {tuple(key.split("|")): Tally.of(item) for key, item in data.items()}  # type: ignore[misc]


def share(tallies: Iterable[Tally], level: str = "own") -> tuple[int, int]:
    """(samples that run, samples)."""
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(getattr(tally, level))
    return total[RUNS], total.total()

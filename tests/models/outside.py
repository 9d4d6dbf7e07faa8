"""Over a hundred models outside the zoo, each in its own process: `python -m tests.models.outside --help`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.commit import commit
from tests.models.case import Case
from tests.models.outcome import CRASHED, GOOD, RAISED, TIMED_OUT, Outcome, outcome_of, write_page
from tests.models.torchvision_ready import prepare

STATE = Path(".models.jsonl")
LIMIT_S = 240.0


@functools.cache
def all_cases() -> dict[str, Case]:
    """Every model whose library is installed, by name."""
    prepare()
    from tests.models import programs, programs_data

    found = programs.CASES + programs_data.CASES
    try:
        from tests.models import huggingface_other, huggingface_text

        found += huggingface_text.CASES + huggingface_other.CASES
        from tests.models import other_libraries

        found += other_libraries.CASES
        from tests.models import timm_models, torchvision_models

        found += torchvision_models.CASES + timm_models.CASES
    except ImportError as error:
        print(f"some models are left out: {error}")
    return {case.name: case for case in found}


def run_one(name: str, limit_s: float = LIMIT_S) -> Outcome:
    """The outcome of a model, tried in a process of its own."""
    case = all_cases()[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.preload"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        answered = ours.poll(limit_s)
        made = ours.recv() if answered else None
    except EOFError:
        process.join()
        return Outcome(name, case.source, CRASHED, note=f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    if made is None:
        return Outcome(name, case.source, TIMED_OUT, note=f"not done after {limit_s:.0f} s", seconds=limit_s)
    return made


def _report(name: str, pipe: multiprocessing.connection.Connection) -> None:
    case = all_cases()[name]
    try:
        made = outcome_of(case)
    except Exception as error:
        made = Outcome(name, case.source, RAISED, note=f"while it was made: {type(error).__name__}: {error}")
    pipe.send(made)


def read_state(path: Path) -> dict[str, Outcome]:
    """Outcomes by name, the last of each."""
    if not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text().splitlines() if line)
    return {row["name"]: Outcome(**row) for row in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the models that the state file does not have; 1 if any raised, differed, crashed or hung."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="names of models to try (again)")
    parser.add_argument("--again", action="store_true", help="try again those that are not well")
    parser.add_argument("--state", type=Path, default=STATE, help="outcomes so far; it goes on from there")
    parser.add_argument("--docs", action="store_true", help="write docs/models.md from the state")
    asked = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    known = read_state(asked.state)
    wanted = asked.only or [
        name for name in all_cases() if name not in known or (asked.again and known[name].outcome not in GOOD)
    ]
    for name in wanted:
        made = dataclasses.replace(run_one(name), commit=commit())
        known[name] = made
        with asked.state.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(made)) + "\n")
        error = "" if made.error is None else f"{made.error:.1e}"
        print(f"{made.outcome:10} {name:42} {error:8} {made.seconds:5.1f} s  {made.note[:150]}", flush=True)
    if asked.docs:
        write_page([known[name] for name in all_cases() if name in known], len(all_cases()))
    print(dict(Counter(made.outcome for made in known.values())))
    return int(any(known[name].outcome not in GOOD for name in wanted))


if __name__ == "__main__":
    raise SystemExit(main())

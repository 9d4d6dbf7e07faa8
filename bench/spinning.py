"""ONNX Runtime's threads: sleeping between layers, spinning until a run ends (the default), spinning always.

    python -m bench.spinning [mobilenet_v2 lstm ...]

A call by itself, a call with products of PyTorch's right after it, which want the same cores, and a call's
share where two threads call at once; ms, medians of interleaved rounds with a rest before every turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from bench import specimens
from rich.console import Console
from rich.table import Table

import intarsia
from intarsia.engines import OnnxRuntime
from intarsia.timing import race

ENGINES = {
    "sleeping": OnnxRuntime(spinning=False),
    "spinning in a run": OnnxRuntime(),
    "spinning always": OnnxRuntime(options={"session.force_spinning_stop": "0"}),
}
PAUSE_S = 0.05
AT_ONCE, CALLS = 2, 3


def followed(call: Callable[[], Any]) -> Callable[[], None]:
    left, right = torch.randn(2, 512, 512)

    def both() -> None:
        call()
        for _ in range(4):
            left @ right

    return both


def at_once(pool: ThreadPoolExecutor, call: Callable[[], Any]) -> Callable[[], None]:
    def calls() -> None:
        with torch.no_grad():  # which every thread has for itself
            for _ in range(CALLS):
                call()

    def burst() -> None:
        for waiting in [pool.submit(calls) for _ in range(AT_ONCE)]:
            waiting.result()

    return burst


def measured(name: str) -> list[list[str]]:
    thing = specimens.specimen(name)
    modules = {
        how: intarsia.compile(thing.model, thing.args, thing.kwargs, engines=[engine], partition="dependency")
        for how, engine in ENGINES.items()
    }
    calls = {how: (lambda m=m: m(*thing.args, **thing.kwargs)) for how, m in modules.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        kinds: dict[str, tuple[dict[str, Callable[[], Any]], float]] = {
            "a call": (dict(calls), 1.0),
            "then PyTorch": ({how: followed(call) for how, call in calls.items()}, 1.0),
            "two at once": ({how: at_once(pool, call) for how, call in calls.items()}, AT_ONCE * CALLS),
        }
        rows = []
        for kind, (peers, share) in kinds.items():
            times = race(peers, rounds=15, budget_s=20, pause_s=PAUSE_S)
            rows.append([name, kind, *(f"{times[how].median / share * 1e3:.2f}" for how in ENGINES)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["mobilenet_v2", "efficientnet", "lstm", "segformer"])
    table = Table(title=f"ONNX Runtime, {torch.get_num_threads()} threads, ms")
    for column in ("model", "", *ENGINES):
        table.add_column(column)
    with torch.no_grad():
        for name in parser.parse_args().models:
            for row in measured(name):
                table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()

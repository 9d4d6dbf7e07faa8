"""Whole architectures at the size they are known by: correctness, share of nodes on engines, latency.

    python bench/architectures.py [names...] [--rounds 10]

Peers run in interleaved rounds in one process with the same thread count; figures are medians.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

import intarsia
from intarsia.cli import zoo
from intarsia.compare import relative_error
from intarsia.timing import race

LINE_UPS = {"onnxruntime": ["onnxruntime"], "openvino": ["openvino"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    table = Table(title=f"full size, float32, batch 1, {torch.get_num_threads()} threads")
    for column in (
        "architecture",
        "eager ms",
        "engine",
        "ms",
        "of eager",
        "nodes on it",
        "error",
        "compile s",
    ):
        table.add_column(column, justify="right")
    for name in asked.names or zoo.names():
        thing = zoo.specimen(name, full=True)
        with torch.no_grad():
            expected = thing.model(*thing.args, **thing.kwargs)
        peers, facts = {"eager": thing.model}, {}
        for label, engines in LINE_UPS.items():
            start = time.perf_counter()
            fast = intarsia.compile(thing.model, thing.args, thing.kwargs, engines=engines)
            seconds = time.perf_counter() - start
            peers[label] = fast
            error = relative_error(fast(*thing.args, **thing.kwargs), expected)
            facts[label] = (fast.plan.on_engines, error, seconds)
        with torch.no_grad():
            times = race(
                {label: lambda p=peer, t=thing: p(*t.args, **t.kwargs) for label, peer in peers.items()},
                rounds=asked.rounds,
                budget_s=20,
            )
        eager = times["eager"].median
        for label, (share, error, seconds) in facts.items():
            took = times[label].median
            table.add_row(
                name,
                f"{eager * 1e3:.1f}",
                label,
                f"{took * 1e3:.1f}",
                f"{took / eager:.2f}",
                f"{share:.1%}",
                f"{error:.1e}",
                f"{seconds:.1f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

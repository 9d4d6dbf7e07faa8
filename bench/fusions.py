"""Every shipped pattern on every engine: time with it over time without; below 1 it pays.

    python bench/fusions.py [--patterns attention rms_norm] [--threads 1] [--seconds 0.5] [--remember]

Programs with and without run in turns in one process, best times compared. `--remember` writes what was
measured where `intarsia.rewrite.apply` looks for it.
"""

from __future__ import annotations

import argparse

import torch

from intarsia.engines import OnnxRuntime, OpenVINO
from intarsia.rewrite import FUSIONS, Benefits
from intarsia.rewrite.apply import PAYS, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patterns", nargs="*", default=list(FUSIONS))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--remember", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)  # which engines follow
    engines = {e.name: e for e in (OnnxRuntime(), OpenVINO())}
    known = Benefits()
    print(f"{'pattern':24}" + "".join(f"{name:>14}" for name in engines))
    for name in options.patterns:
        fusion = FUSIONS[name]
        cells = []
        for engine in engines.values():
            if not fusion.suits(engine):
                cells.append(f"{'-':>14}")
                continue
            ratio = measure(fusion, engine.build, seconds=options.seconds)
            if options.remember and not fusion.free:
                known.remember(engine, name, ratio)
            cells.append(f"{ratio:>13.2f}{'*' if ratio <= PAYS or fusion.free else ' '}")
        print(f"{name:24}" + "".join(cells), flush=True)
    print("* applied by default: it pays, or it only takes layers away")


if __name__ == "__main__":
    main()

"""More than twenty whole models against eager, torch.compile, torch.onnx + ONNX Runtime, OpenVINO's importer.

    python bench/models.py [names...] [--out bench-results] [--limit 900] [--tolerance 0.02] [--docs docs]

The same as `intarsia bench`. One process a model, each with a limit on time; results are kept as JSON in
`--out`, and a run that was stopped goes on where it was. At the end: a table, results.json and chart.svg.
"""

from __future__ import annotations

import typer

from intarsia.cli.bench import bench

if __name__ == "__main__":
    typer.run(bench)

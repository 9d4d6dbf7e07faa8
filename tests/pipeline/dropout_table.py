"""GPT, T5 and ViT trained with dropout in every way a pipeline runs, against a plain loop with the same keys.

`python tests/pipeline/dropout_table.py` prints a table of docs/measurements.md: for each way, the largest
error of a loss over the steps, and of a final weight as a share of the largest change of any weight.
"""

from __future__ import annotations

import itertools
import json
import tempfile

import torch
from pipeline_compare import MODES
from rank_dropout import A_RANK, gpipe_run
from rank_launch import launch

MODELS = ("gpt", "t5", "vit")
SCHEDULES = ("GPipe", "1F1B", "ZeroBubble", *A_RANK)
Row = dict[str, float]


def on_ranks(way: str, world: int, *names: str) -> dict[str, Row]:
    """The largest errors of any rank, by model."""
    rows: dict[str, Row] = {name: {"loss": 0.0, "weight": 0.0} for name in names}
    for status, output in launch(":".join(["rank_dropout.trained", way, *names]), world=world):
        assert status == 0, output
        for line in output.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                held = rows[row["model"]]
                rows[row["model"]] = {key: max(value, row[key]) for key, value in held.items()}
    return rows


def resumed(*names: str, save: str = "save", saving: int = 2, resume: str = "resume", world: int = 3):
    """Three ranks go on from what two saved."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(f"{save}:{folder}", saving, *names)
        return on_ranks(f"{resume}:{folder}", world, *names)


def every_way():
    """The ways by their names in the table, and how to run them."""
    for chunks, mode in itertools.product((1, 4), MODES):
        yield (
            f'`gpipe(chunks={chunks}, checkpoint="{mode}")`',
            lambda c=chunks, m=mode: {name: gpipe_run(name, c, m) for name in MODELS},
        )
    yield (
        "`gpipe(chunks=4)`, modules recomputed by name",
        lambda: {name: gpipe_run(name, 4, "except_last", True) for name in MODELS},
    )
    for schedule, world in itertools.product(SCHEDULES, (2, 4)):
        yield f"{schedule}, {world} ranks", lambda s=schedule, w=world: on_ranks(f"schedule:{s}", w, *MODELS)
    for schedule in ("1F1B", "ZeroBubble"):
        yield (
            f"{schedule}, 2 ranks, modules recomputed by name",
            lambda s=schedule: on_ranks(f"recompute:{s}", 2, *MODELS),
        )
    yield "1F1B, mesh of 2 x 2", lambda: on_ranks("mesh:", 4, *MODELS)
    yield "1F1B, 3 ranks resume what 2 saved", lambda: resumed(*MODELS)


def main() -> None:
    torch.set_num_threads(1)
    print("| way | GPT: loss, weights | T5 | ViT |\n| --- | --- | --- | --- |")
    for way, run in every_way():
        rows = run()
        cells = [f"{rows[name]['loss']:.0e}, {rows[name]['weight']:.0e}" for name in MODELS]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Plans of real architectures as text; run with UPDATE_GOLDENS=1 to write them anew."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from intarsia.capture.export import capture
from intarsia.cli import zoo
from intarsia.convert import registry
from intarsia.lower import lower
from intarsia.partition import STRATEGIES, PartitionOptions, dependency

from .graphs import refuse

transformers = pytest.importorskip("transformers", reason="the architectures come from Hugging Face")

GOLDENS = Path(__file__).parent / "goldens"
ONE = PartitionOptions(min_block_size=1)
PINNED = torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.22.")
# An engine that knows linear algebra and arithmetic, and none of these.
REFUSED = ("gelu", "softmax", "layer_norm", "hardtanh", "mean", "roll", "silu", "embedding")


@pytest.mark.skipif(not PINNED, reason="other versions of torch and transformers export other graphs")
@pytest.mark.parametrize("name", zoo.names())
def test_the_plan_reads_as_it_did(name: str) -> None:
    thing = zoo.specimen(name)
    program = capture(thing.model, thing.args, thing.kwargs)
    gm = lower(program, has_converter=registry.__contains__).module
    table = refuse(gm, *REFUSED)
    counts = [len(STRATEGIES[name](gm, table, ONE).verify(gm)) for name in ("dependency", "greedy")]
    assert counts[0] <= counts[1]
    text = f"{dependency(gm, table, PartitionOptions(min_block_size=2)).verify(gm)}\n"
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.partition.graphs import Lgamma, lower, table_by
from intarsia.partition import STRATEGIES, PartitionOptions, extract
gm = lower(Lgamma(), (torch.rand(3, 4), torch.rand(3, 4)))
names = {"lgamma": "pytorch", "mul": "b"}
table = table_by(gm, lambda n: names.get(n.name.split("_")[0], "a"), ("a", "b", "pytorch"))
for strategy in STRATEGIES.values():
    plan = strategy(gm, table, PartitionOptions(min_block_size=1))
    print(plan)
    for piece in extract(gm, plan):
        print(piece.module.graph)
"""


def test_plans_do_not_hang_on_the_hash_seed() -> None:
    """In a process of another seed, what is printed is what this one prints."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, root],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    with contextlib.redirect_stdout(io.StringIO()) as here, mock.patch.object(sys, "argv", ["", root]):
        exec(compile(_SCRIPT, "<script>", "exec"), {})
    assert done.stdout == here.getvalue() and "3 segments" not in done.stdout.splitlines()[0]

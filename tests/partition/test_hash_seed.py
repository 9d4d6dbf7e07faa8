"""Plans are the same in every process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

pytestmark = pytest.mark.slow

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

"""Ranks forked from one process that has imported what they use: `rank_fork.py WORLD WORKER CASE...`.

Most of what a small case takes is the imports. Forked ranks share the seed of `hash()`, which ranks of a real
job do not: test_distributed.py starts its ranks one by one.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from intarsia.pipeline.stages.trace import trace


def main(world: int, worker: Path, arguments: list[str], files: list[int]) -> list[int]:
    """The exit status of each rank, which writes into its file."""
    sys.path.insert(0, str(worker.parent))
    module = importlib.import_module(worker.stem)
    trace(nn.Linear(2, 2), (torch.ones(4, 2),))  # much more is imported when a model is first looked at
    if hasattr(module, "prepare"):
        module.prepare(*arguments)
    assert threading.active_count() == 1, f"forked beside {threading.enumerate()}"
    sys.argv = [str(worker), *arguments]
    ranks = []
    for rank in range(world):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            os.dup2(files[rank], 1)
            os.dup2(files[rank], 2)
            runpy.run_path(str(worker), run_name="__main__")
            sys.exit()
        ranks.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


if __name__ == "__main__":
    world = int(sys.argv[1])
    print(
        json.dumps(
            main(world, Path(sys.argv[2]), sys.argv[3 + world :], [*map(int, sys.argv[3 : 3 + world])])
        )
    )

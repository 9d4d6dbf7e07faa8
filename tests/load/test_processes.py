"""Other processes: forked from one that has compiled, and started anew."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import intarsia

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_compiling_in_a_forked_process() -> None:
    """A fork has none of its parent's threads: what it calls must be compiled in it, or run in PyTorch."""
    code = """
        import os, sys, torch, intarsia
        from torch import nn
        torch.set_num_threads(1)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
        fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
        expected = model(x).detach()
        child = os.fork()
        if child == 0:
            try:
                same = torch.allclose(fast(x), expected, atol=1e-5)
                again = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
                os._exit(0 if same and torch.allclose(again(x), expected, atol=1e-5) else 1)
            except BaseException:
                os._exit(2)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=200, check=False)
    assert done.returncode == 0


def _child(queue: object) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4)
    fast = intarsia.compile(model, (x,), min_block_size=1)
    queue.put(torch.allclose(fast(x), model(x), atol=1e-5))  # type: ignore[attr-defined]


def test_compiling_in_a_spawned_process() -> None:
    intarsia.compile(nn.ReLU(), (torch.ones(2),))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    assert queue.get(timeout=200) is True
    process.join(60)
    assert process.exitcode == 0

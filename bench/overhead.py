"""What the inlay costs: a stitched one-segment program against the bare engine session.

    python bench/overhead.py

Peers run in interleaved rounds in one process with the same thread count; figures are medians.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import intarsia
from intarsia.timing import race


class Chain(nn.Module):
    """A matrix product and a relu, as often as asked."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def bare_onnxruntime(program: Any, x: torch.Tensor) -> Callable[[], object]:
    """`session.run` on numpy arrays, as one would call it by hand."""
    session, feed = program._session, {program._names[0]: x.numpy()}
    return lambda: session.run(None, feed)


def bare_openvino(program: Any, x: torch.Tensor) -> Callable[[], object]:
    """`request.infer` on shared numpy arrays."""
    request, feed = program._compiled.create_infer_request(), [x.numpy()]
    return lambda: request.infer(feed, share_inputs=True, share_outputs=True)


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="stitched over bare session, 1 thread")
    for column in ("engine", "model", "bare us", "stitched us", "median ratio", "best ratio"):
        table.add_column(column, justify="right")
    sizes = {"about 100 us": (896, 1), "about 10 ms": (2048, 12)}
    for engine, bare in (("onnxruntime", bare_onnxruntime), ("openvino", bare_openvino)):
        for label, (width, depth) in sizes.items():
            model, x = Chain(width, depth).eval(), torch.randn(1, width)
            fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
            (step,) = fast.inlay.steps
            peers = {"bare": bare(step.program.program, x), "stitched": lambda f=fast, x=x: f(x)}
            times = race(peers, rounds=200)
            a, b = times["bare"], times["stitched"]
            table.add_row(
                engine,
                label,
                f"{a.median * 1e6:.1f}",
                f"{b.median * 1e6:.1f}",
                f"{b.median / a.median:.3f}",
                f"{b.best / a.best:.3f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()

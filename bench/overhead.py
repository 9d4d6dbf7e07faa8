"""What we add to an engine: a stitched one-segment program against the bare session, guards against none.

    python bench/overhead.py
    python bench/overhead.py --guards [name ...]

Peers run in interleaved rounds in one process with one thread; figures are medians. `--guards` runs whole
architectures at full size on OpenVINO, which watches for NaN, large integers and wrong indices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import intarsia
from intarsia.cli import zoo
from intarsia.timing import race

NAMES = ("resnet50", "mobilenet_v2", "bert", "gpt2", "llama", "vit")
Pair = tuple[tuple[str, str], Callable[[], object], Callable[[], object]]  # labels, without, with


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


def stitched() -> Iterator[Pair]:
    """A bare session, and the module that holds it."""
    sizes = {"about 100 us": (896, 1), "about 10 ms": (2048, 12)}
    for engine, bare in (("onnxruntime", bare_onnxruntime), ("openvino", bare_openvino)):
        for label, (width, depth) in sizes.items():
            model, x = Chain(width, depth).eval(), torch.randn(1, width)
            fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
            (step,) = fast.inlay.steps
            yield (engine, label), bare(step.program.program, x), lambda f=fast, x=x: f(x)


def guarded(names: list[str]) -> Iterator[Pair]:
    """An architecture without guards, and with them."""
    for name in names or NAMES:
        thing = zoo.specimen(name, full=True)
        bare, watched = (
            thing.compile(engines=[intarsia.OpenVINO(threads=1, guards=guards)], min_block_size=1)
            for guards in (False, True)
        )
        count = sum(len(step.program.program.guards) for step in watched.inlay.steps)
        calls = [lambda f=f, t=thing: f(*t.args, **t.kwargs) for f in (bare, watched)]
        yield (name, str(count)), *calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--guards", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="one thread, batch 1")
    for column in ("", "guards" if options.guards else "", "without", "with", "median ratio", "best ratio"):
        table.add_column(column, justify="right")
    for labels, without, with_it in guarded(options.names) if options.guards else stitched():
        times = race({"without": without, "with": with_it}, rounds=200, budget_s=30)
        a, b = times["without"], times["with"]
        ratios = f"{b.median / a.median:.3f}", f"{b.best / a.best:.3f}"
        table.add_row(*labels, f"{a.median * 1e6:.1f} us", f"{b.median * 1e6:.1f} us", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()

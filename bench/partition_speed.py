"""Partitioning speed and segment counts: ours beside torch.fx's partitioner and splitter.

    python bench/partition_speed.py            # up to 4,000 ops, all three
    python bench/partition_speed.py --large    # ours alone, up to 100,000 ops

Times are CPU seconds of one process, the least of the rounds; the tools take turns within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import time
from collections.abc import Callable

import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupport
from torch.fx.passes.splitter_base import _SplitterBase, _SplitterSettingBase

from intarsia.graph.nodes import compute_nodes
from intarsia.partition import PartitionOptions, SupportTable, dependency, extract, greedy

aten = torch.ops.aten
SUPPORTED, UNSUPPORTED = aten.sin.default, aten.lgamma.default


def chain(ops: int, segments: int, width: int = 4) -> fx.GraphModule:
    """`width` chains side by side in every block, each ending in an unsupported op, then joined."""
    graph = fx.Graph()
    value = torch.empty(4, device="meta")

    def call(target: object, *args: fx.Node) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    source = graph.placeholder("x")
    source.meta["val"] = value
    blocks = max(1, segments // 2)
    length = max(1, (ops // blocks - 2 * width + 1) // width)
    for _ in range(blocks):
        ends = []
        for _ in range(width):  # lane after lane, so that graph order alternates between the targets
            lane = source
            for _ in range(length):
                lane = call(SUPPORTED, lane)
            ends.append(call(UNSUPPORTED, lane))
        source = ends[0]
        for end in ends[1:]:
            source = call(aten.add.Tensor, source, end)
    graph.output((source,))
    return fx.GraphModule({}, graph)


class _Supports(OperatorSupport):
    def is_node_supported(self, submodules: object, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is not UNSUPPORTED


class _Splitter(_SplitterBase):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, (torch.empty(4),), _Supports(), _SplitterSettingBase(min_acc_module_size=1))


def table_of(gm: fx.GraphModule) -> SupportTable:
    """The support table of a chain."""
    refused = [node for node in compute_nodes(gm.graph) if node.target is UNSUPPORTED]
    return SupportTable(("engine", "pytorch"), {node: {"engine": "no converter"} for node in refused})


def ours(strategy: Callable[..., object]) -> Callable[[fx.GraphModule], tuple[int, int]]:
    """Plan, verify and cut; the numbers of engine segments and of all segments."""

    def run(gm: fx.GraphModule) -> tuple[int, int]:
        plan = strategy(gm, table_of(gm), PartitionOptions(min_block_size=1))
        plan.verify(gm)
        extract(gm, plan)
        return plan.count("engine"), len(plan)

    return run


def capability(gm: fx.GraphModule) -> tuple[int, int]:
    """torch.fx's CapabilityBasedPartitioner: propose and fuse; what it does not fuse stays loose."""
    partitioner = CapabilityBasedPartitioner(gm, _Supports(), allows_single_node_partition=True)
    partitions = partitioner.propose_partitions()
    partitioner.fuse_partitions(partitions)
    return len(partitions), -1


def splitter(gm: fx.GraphModule) -> tuple[int, int]:
    """torch.fx's splitter: every run of supported nodes becomes a submodule."""
    split = _Splitter(gm)()
    names = [name for name, _ in split.named_children()]
    return sum("acc" in name for name in names), len(names)


def seconds(run: Callable[[fx.GraphModule], tuple[int, int]], gm: fx.GraphModule) -> tuple[float, tuple]:
    """CPU time of one run on a fresh graph, and what it counted."""
    gc.collect()
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        counted = run(gm)
    return time.process_time() - start, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="ours alone, on graphs up to 100,000 ops")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=10.0, help="drop a tool once a run took this long")
    options = parser.parse_args()
    tools = {"intarsia dependency": ours(dependency), "intarsia greedy": ours(greedy)}
    sizes = [(12_500, 1250), (25_000, 2500), (50_000, 5000), (100_000, 10_000)]
    if not options.large:
        tools |= {"torch.fx capability": capability, "torch.fx splitter": splitter}
        sizes = [(500, 50), (1000, 100), (2000, 200), (4000, 400)]
    print(
        f"{'ops':>8} {'asked':>6}  {'tool':<20} {'CPU s':>9} {'growth':>7} {'engine segments':>16} {'all':>6}"
    )
    previous: dict[str, float] = {}
    for ops, segments in sizes:
        best: dict[str, tuple[float, tuple]] = {}
        for _ in range(options.rounds):
            for name, run in list(tools.items()):
                taken = seconds(run, chain(ops, segments))
                best[name] = min(best.get(name, taken), taken)
        for name, (taken, (accelerated, total)) in best.items():
            growth = f"{taken / previous[name]:.2f}x" if name in previous else ""
            everything = "loose" if total < 0 else str(total)
            row = f"{ops:>8} {segments:>6}  {name:<20} {taken:>9.3f} {growth:>7}"
            print(f"{row} {accelerated:>16} {everything:>6}")
            previous[name] = taken
            if taken > options.patience:
                print(f"{'':>16} {name} is left out from here: it took more than {options.patience:.0f} s")
                del tools[name]
    gm = chain(40, 4)
    print("\nAn example of the graphs, at 40 ops:")
    print(dependency(gm, table_of(gm), PartitionOptions(min_block_size=1)))


if __name__ == "__main__":
    main()

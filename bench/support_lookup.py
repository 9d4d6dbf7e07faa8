"""What asking for support costs: a first dry conversion, a first answer of an engine, a repeated look-up.

    python bench/support_lookup.py [--layers 12] [--rounds 20]

Every node of a BERT is asked of every engine. Times are processor time of this process, so that other work
on the machine does not count; a look-up is one node on one engine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from transformers import BertConfig, BertModel

from intarsia.convert import interpreter, registry
from intarsia.convert.interpreter import constant_of
from intarsia.engines import OnnxRuntime, OpenVINO, PyTorch
from intarsia.graph.nodes import is_compute
from intarsia.lower import lower
from intarsia.partition import support


def bert(layers: int) -> fx.GraphModule:
    """The graph a partitioner would see."""
    model = BertModel(BertConfig(num_hidden_layers=layers)).eval()
    ids = torch.randint(0, 1000, (1, 128))
    program = torch.export.export(model, (ids, torch.ones_like(ids)), strict=False)
    return lower(program, registry.__contains__).module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    module = bert(options.layers)
    constants = {n: constant_of(module, n) for n in module.graph.nodes if n.op == "get_attr"}
    nodes = [n for n in module.graph.nodes if is_compute(n)]
    table = Table(title=f"BERT, {options.layers} layers, {len(nodes)} nodes")
    for column in ("what", "per node", "goal"):
        table.add_column(column, justify="left" if column == "what" else "right")

    started = time.process_time()
    for node in nodes:
        interpreter._memo.clear()
        interpreter.dry_convert(node, constants, interpreter.signature_of(node, constants))
    table.add_row(
        "dry conversion, nothing remembered", _ms(time.process_time() - started, len(nodes)), "2 ms"
    )

    interpreter._memo.clear()
    started = time.process_time()
    for node in nodes:
        interpreter.dry_convert(node, constants, interpreter.signature_of(node, constants))
    table.add_row("dry conversion, by signature", _ms(time.process_time() - started, len(nodes)), "2 ms")

    for engine in (OnnxRuntime(threads=1), OpenVINO(threads=1)):
        started = time.process_time()
        support.support_table(module, [engine, PyTorch()])
        table.add_row(f"first answer of {engine.name}", _ms(time.process_time() - started, len(nodes)), "")
        rounds = []
        for _ in range(options.rounds):
            started = time.process_time()
            support.support_table(module, [engine, PyTorch()])
            rounds.append((time.process_time() - started) / len(nodes))
        again = f"{1e6 * statistics.median(rounds):.1f} us"
        table.add_row(f"repeated look-up, {engine.name}", again, "100 us")
    Console().print(table)


def _ms(seconds: float, count: int) -> str:
    return f"{1e3 * seconds / count:.3f} ms"


if __name__ == "__main__":
    main()

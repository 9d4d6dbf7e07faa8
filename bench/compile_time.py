"""Capture to callable: BERT-base by Intarsia against `torch.onnx.export` plus the engine's own loading.

    python bench/compile_time.py [--rounds 3]

Peers run in turn, round by round, in one process; figures are medians in seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import onnxruntime
import openvino
import torch
from rich.console import Console
from rich.table import Table

import intarsia
from intarsia.cli import zoo


def peers(thing: zoo.Specimen, folder: Path) -> dict[str, Callable[[], object]]:
    path = folder / "model.onnx"

    def export() -> None:
        torch.onnx.export(thing.model, thing.args, path, kwargs=thing.kwargs, dynamo=True, verbose=False)

    def onnx_then_onnxruntime() -> object:
        export()
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def onnx_then_openvino() -> object:
        export()
        core = openvino.Core()
        return core.compile_model(core.read_model(path), "CPU")

    def ours(engine: str) -> Callable[[], object]:
        return lambda: intarsia.compile(thing.model, thing.args, thing.kwargs, engines=[engine])

    return {
        "onnxruntime: torch.onnx.export + session": onnx_then_onnxruntime,
        "onnxruntime: intarsia.compile": ours("onnxruntime"),
        "openvino: torch.onnx.export + compile_model": onnx_then_openvino,
        "openvino: intarsia.compile": ours("openvino"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore")
    thing = zoo.specimen("bert", full=True)
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runners = peers(thing, Path(folder))
        for call in runners.values():  # imports and first-use costs of every peer
            call()
        for _ in range(rounds):
            for name, call in runners.items():
                start = time.perf_counter()
                call()
                took.setdefault(name, []).append(time.perf_counter() - start)
    table = Table(title="BERT-base, 1 x 128 tokens, float32: seconds from model to callable")
    for column in ("", "median s", "ratio to export"):
        table.add_column(column)
    for name, seconds in took.items():
        engine = name.split(":")[0]
        base = next(value for key, value in took.items() if key.startswith(f"{engine}: torch"))
        ratio = statistics.median(seconds) / statistics.median(base)
        table.add_row(name, f"{statistics.median(seconds):.2f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

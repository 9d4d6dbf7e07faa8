"""Capture to callable: Intarsia in the fixed order against `torch.onnx.export` plus the engine's own loading.

    python bench/compile_time.py [bert ...] [--all] [--rounds 3] [--small] [--measured | --only-measured]
    python bench/compile_time.py [bert ...] [--all] [--rounds 1] [--small] --default | --varying

Peers run in turn, round by round, in one process; figures are medians in seconds. `--measured` adds the
default, which measures, with nothing known of the model and with known costs. `--default` and `--varying`
compare the cold default with `torch.onnx.export` and a session, by seconds and by CPU seconds (of a machine
that others use, only these mean something); with `--varying` batch and length vary, and rows are padded.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["INTARSIA_CACHE_GB"] = "0"  # what was compiled before is compiled again

import onnxruntime
import openvino
import torch
from rich.console import Console
from rich.table import Table

import intarsia
from intarsia.cli import zoo


def peers(thing: zoo.Specimen, folder: Path) -> dict[str, Callable[[], object]]:
    path = folder / "model.onnx"

    def onnx_then_onnxruntime() -> object:
        thing.export_onnx(path)
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def onnx_then_openvino() -> object:
        thing.export_onnx(path)
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


def took(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def against_export(name: str, full: bool, rounds: int, table: Table) -> None:
    thing = zoo.specimen(name, full=full)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runners = peers(thing, Path(folder))
        for peer in list(runners):  # imports and first-use costs of every peer
            try:
                runners[peer]()
            except Exception as error:
                table.add_row(name, peer, f"fails: {type(error).__name__}", "")
                del runners[peer]
        for _ in range(rounds):
            for peer, call in runners.items():
                seconds.setdefault(peer, []).append(took(call))
    medians = {peer: statistics.median(of_peer) for peer, of_peer in seconds.items()}
    for peer, median in medians.items():
        engine = peer.split(":")[0]
        base = next((m for key, m in medians.items() if key.startswith(f"{engine}: torch")), None)
        table.add_row(name, peer, f"{median:.2f}", "" if base is None else f"{median / base:.2f}")


def measured(name: str, full: bool, rounds: int, table: Table) -> None:
    thing = zoo.specimen(name, full=full)
    seconds: dict[str, list[float]] = {}

    def compiled(partition: str | None) -> float:
        return took(lambda: intarsia.compile(thing.model, thing.args, thing.kwargs, partition=partition))

    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["INTARSIA_CACHE"] = folder
            compiled("dependency")  # patterns are measured once on a machine
            for label, partition in (("fixed", "dependency"), ("cold", None), ("again", None)):
                seconds.setdefault(label, []).append(compiled(partition))
    medians = {label: statistics.median(of_label) for label, of_label in seconds.items()}
    for label in ("cold", "again"):
        ratio = f"{medians[label] / medians['fixed']:.2f}"
        table.add_row(name, f"measured, {label}, over the fixed order", f"{medians[label]:.2f}", ratio)


_VARYING = ("bert", "gpt2", "distilbert", "t5_encoder")
_BERT_LAYERS = 6


def cpu_s() -> float:
    """CPU time of this process, its threads and its children."""
    users = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in users)


def varying(name: str, full: bool) -> zoo.Specimen:
    """A model of tokens with two padded rows, whose batch and length vary."""
    thing = zoo.specimen(name, full=full)
    if name == "bert":
        thing.model.encoder.layer = thing.model.encoder.layer[:_BERT_LAYERS]
    return thing.padded(2, varying=True)


def cold(name: str, thing: zoo.Specimen, rounds: int, table: Table) -> None:
    """The default with nothing known of the model, over `torch.onnx.export` and a session."""

    def session() -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            thing.export_onnx(path)
            return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def ours() -> object:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["INTARSIA_CACHE"] = folder
            compiled = thing.compile()
            plans[:] = [getattr(compiled, "plan", None)]
            return compiled

    plans: list[object] = []
    spent: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for label, call in (("export + session", session), ("intarsia.compile", ours)):
            before = cpu_s()
            try:
                seconds = took(call)
            except Exception as error:  # torch.onnx.export fails for T5
                if label == "intarsia.compile":
                    raise
                table.add_row(name, label, f"fails: {type(error).__name__}", "")
                continue
            spent.setdefault(label, []).append((seconds, cpu_s() - before))
    medians = {label: [statistics.median(one) for one in zip(*s, strict=True)] for label, s in spent.items()}
    base = medians.get("export + session")
    for label, (seconds, cpu) in medians.items():
        ratios = "" if base is None else f"{seconds / base[0]:.2f}, {cpu / base[1]:.2f}"
        table.add_row(name, label, f"{seconds:.1f}, {cpu:.1f}", ratios)
    print(*plans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--only-measured", action="store_true")
    parser.add_argument("--default", action="store_true")
    parser.add_argument("--varying", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    if asked.default or asked.varying:
        print(f"seconds and CPU seconds; load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
        cold("warm-up", varying("bert", False), 1, Table())  # imports and first-use costs of both
        every = _VARYING if asked.varying else zoo.names()
        for name in asked.names or every:
            table = Table("model", "", "s, CPU s", "ratios")
            full = not asked.small
            thing = varying(name, full) if asked.varying else zoo.specimen(name, full=full)
            cold(name, thing, asked.rounds, table)
            Console(width=140).print(table)
        return
    print("float32, batch 1: seconds from model to callable")
    for name in zoo.names() if asked.all else asked.names or ["bert"]:
        table = Table("model", "", "median s", "ratio")  # one a model: a run that is stopped has told some
        if not asked.only_measured:
            against_export(name, not asked.small, asked.rounds, table)
        if asked.measured or asked.only_measured:
            measured(name, not asked.small, asked.rounds, table)
        Console(width=140).print(table)


if __name__ == "__main__":
    main()

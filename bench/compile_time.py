"""Capture to callable: Intarsia in the fixed order against `torch.onnx.export` plus the engine's own loading.

    python -m bench.compile_time [bert ...] [--all] [--rounds 3] [--small] [--measured | --only-measured]
    python -m bench.compile_time [bert ...] [--rounds 1] [--small] --cold

Peers run in turn, round by round, in one process; figures are medians in seconds. `--measured` adds the
default, which measures, with nothing known of the model and with known costs.

`--cold` compares the default with `torch.onnx.export` and a session of ONNX Runtime. Every compile runs in a
process of its own with an empty cache. The models have fixed sizes; those of tokens run again with padded
rows, and batch and length that vary. On a machine that others use, only CPU seconds mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["INTARSIA_CACHE_GB"] = "0"  # what was compiled before is compiled again

import onnxruntime
import openvino
import torch
from bench.specimens import names, specimen
from rich.console import Console
from rich.table import Table

import intarsia
from intarsia.cli.zoo import Specimen


def peers(thing: Specimen, folder: Path) -> dict[str, Callable[[], object]]:
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
    thing = specimen(name, full=full)
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
    thing = specimen(name, full=full)
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
_SESSION, _OURS = "export + session", "intarsia.compile"


def cpu_s() -> float:
    """CPU time of this process, its threads and its children."""
    users = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in users)


def varying(name: str, full: bool) -> Specimen:
    """A model of tokens with two padded rows, whose batch and length vary."""
    thing = specimen(name, full=full)
    if name == "bert":
        thing.model.encoder.layer = thing.model.encoder.layer[:_BERT_LAYERS]
    return thing.padded(2, varying=True)


def once(label: str, name: str, full: bool, varies: bool) -> None:
    """Print the seconds and the CPU seconds of one compile, and the plan. It is the first of its process."""
    thing = varying(name, full) if varies else specimen(name, full=full)
    start, before = time.perf_counter(), cpu_s()
    # With gradients on, `torch.onnx.export` fails for Swin and T5 (torch 2.13, transformers 5.22).
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if label == _SESSION:
            path = Path(folder, "model.onnx")
            thing.export_onnx(path)
            compiled = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        else:
            os.environ["INTARSIA_CACHE"] = folder
            compiled = thing.compile()
        spent = time.perf_counter() - start, cpu_s() - before
        print(getattr(compiled, "plan", ""), json.dumps(spent), sep="\n")


def cold(name: str, full: bool, varies: bool, rounds: int) -> tuple[float, float] | None:
    """The ratios of the default's seconds and CPU seconds to the peer's; None if the peer fails."""
    spent: dict[str, list[tuple[float, float]]] = {_SESSION: [], _OURS: []}
    for number in range(rounds):
        for label in (_SESSION, _OURS) if number % 2 == 0 else (_OURS, _SESSION):
            size = [] if full else ["--small"]
            sizes = ["--varies"] if varies else []
            command = [sys.executable, "-m", "bench.compile_time", name, "--once", label, *size, *sizes]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode == 0:
                *plan, figures = run.stdout.splitlines()
                seconds, cpu = json.loads(figures)
                spent[label].append((seconds, cpu))
                print(*plan, sep="\n", flush=True)
            elif label == _OURS:
                raise SystemExit(run.stderr)
            else:
                print(f"{name}: {label} fails: {run.stderr.splitlines()[-1]}")
    table = Table("model", "sizes", "", "s", "CPU s")
    medians = {label: over(statistics.median, pairs) for label, pairs in spent.items()}
    for label, values in medians.items():
        table.add_row(name, "vary" if varies else "fixed", label, *(f"{value:.1f}" for value in values))
    ratios = [ours / peer for ours, peer in zip(medians[_OURS], medians[_SESSION], strict=False)]
    if ratios:
        table.add_row(name, "", "ratio", *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=140).print(table)
    return (ratios[0], ratios[1]) if ratios else None


def over(of: Callable[[Iterable[float]], float], pairs: Sequence[tuple[float, float]]) -> list[float]:
    """The median, or another value, of the first and of the second figures of pairs."""
    return [of(one) for one in zip(*pairs, strict=True)]


def all_cold(asked: Sequence[str], full: bool, rounds: int) -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    for varies, known in ((False, names()), (True, _VARYING)):
        chosen = [name for name in asked or known if not varies or name in known]
        every = [cold(name, full, varies, rounds) for name in chosen]
        ratios = [one for one in every if one is not None]
        if ratios:
            (middle, middle_cpu), (most, most_cpu) = over(statistics.median, ratios), over(max, ratios)
            print(
                f"{'sizes that vary' if varies else 'fixed sizes'}, {len(ratios)} models:"
                f" seconds {middle:.2f} in the median, {most:.2f} at most;"
                f" CPU seconds {middle_cpu:.2f} in the median, {most_cpu:.2f} at most"
            )


def warm(asked: argparse.Namespace) -> None:
    print("float32, batch 1: seconds from model to callable")
    for name in names() if asked.all else asked.names or ["bert"]:
        table = Table("model", "", "median s", "ratio")  # one a model: a run that is stopped has told some
        if not asked.only_measured:
            against_export(name, not asked.small, asked.rounds, table)
        if asked.measured or asked.only_measured:
            measured(name, not asked.small, asked.rounds, table)
        Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--only-measured", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--varies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    if asked.once:
        once(asked.once, *asked.names, not asked.small, asked.varies)
    elif asked.cold:
        all_cold(asked.names, not asked.small, asked.rounds)
    else:
        warm(asked)


if __name__ == "__main__":
    main()

"""Loading a saved model against the engine loading its own format, and a second compile against a first.

    python bench/ship.py [--model bert] [--rounds 5] [--small]

Every figure is of a process of its own. `load` has imported torch and the engine when its clock starts;
memory is what the process's peak grew by from there: torch, which the engine alone does without, is not
counted. The engine's own formats: OpenVINO's compiled blob, mapped into memory, and its IR; ONNX Runtime's
optimised model with external data. Medians and ratios of the medians, peers in turn, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
OPENVINO = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}


def peak_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--small", action="store_true", help="the small form of the model, to see that it works"
    )
    parser.add_argument("--step", nargs=2, metavar=("STEP", "FOLDER"), help=argparse.SUPPRESS)
    wish = parser.parse_args()
    if wish.step is not None:
        print(json.dumps(STEPS[wish.step[0]](Path(wish.step[1]), wish)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("openvino", "onnxruntime"):
            run(f"make_{engine}", folder, wish)
        loads = [name for name in STEPS if name.startswith("load_")]
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(wish.rounds):
            for name in loads:
                found.setdefault(name, []).append(run(name, folder, wish))
        report_loads(found)
        report_imports([run("imports", folder, wish) for _ in range(wish.rounds)])
        cold, warm = [], []
        for number in range(max(1, wish.rounds // 2)):
            cache = {"INTARSIA_CACHE": str(Path(folder) / f"cache{number}")}
            cold.append(run("compile", folder, wish, cache))
            warm.append(run("compile", folder, wish, cache))
        report_compiles(cold, warm)


def run(
    step: str, folder: str, wish: argparse.Namespace, env: dict[str, str] | None = None
) -> dict[str, float]:
    own = ["--step", step, folder, "--model", wish.model, *(["--small"] if wish.small else [])]
    ran = subprocess.run(
        [sys.executable, __file__, *own], capture_output=True, text=True, env={**os.environ, **(env or {})}
    )
    if ran.returncode:
        raise SystemExit(f"{step} failed:\n{ran.stderr[-3000:]}")
    made: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return made


def specimen(wish: argparse.Namespace) -> Any:
    from intarsia.cli import zoo

    return zoo.specimen(wish.model, full=not wish.small)


def make(engine: str, folder: Path, wish: argparse.Namespace) -> dict[str, float]:
    """Save the compiled model, and what the engine itself would save of the same network."""
    os.environ["INTARSIA_CACHE_GB"] = "0"
    import intarsia

    thing = specimen(wish)
    fast: Any = intarsia.compile(thing.model, thing.args, thing.kwargs, engines=engine)
    start = time.perf_counter()
    intarsia.save(fast, folder / f"{engine}.intarsia")
    took = time.perf_counter() - start
    made = type(fast(*thing.args, **thing.kwargs)).__module__
    (folder / "imports").write_text(made if made.startswith("transformers.") else "json")
    network = fast.inlay.steps[0].program.origin.network
    if engine == "openvino":
        import openvino

        from intarsia.engines.openvino.model import read

        model, _ = read(network)
        openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
        compiled = openvino.Core().compile_model(folder / "model.xml", "CPU", OPENVINO)
        (folder / "model.blob").write_bytes(compiled.export_model().getvalue())
    else:
        import onnx
        import onnxruntime

        from intarsia.network.serialize import to_proto

        proto, _ = to_proto(network, weights_outside=False)
        onnx.save(proto, str(folder / "plain.onnx"), save_as_external_data=True, location="plain.bin")
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(folder / "optimised.onnx")
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "optimised.bin"
        )
        onnxruntime.InferenceSession(str(folder / "plain.onnx"), options, providers=["CPUExecutionProvider"])
    return {"save_s": took}


def measured(load: Any) -> dict[str, float]:
    before, cpu, start = peak_kb(), sum(os.times()[:2]), time.perf_counter()
    made = load()
    took, spent, grown = time.perf_counter() - start, sum(os.times()[:2]) - cpu, peak_kb() - before
    assert made is not None
    return {"s": took, "cpu_s": spent, "mb": grown / 1024, "peak_mb": peak_kb() / 1024}


def load_ours(engine: str, folder: Path, wish: argparse.Namespace) -> dict[str, float]:
    import importlib

    import torch  # noqa: F401

    importlib.import_module((folder / "imports").read_text())
    importlib.import_module(engine)
    import intarsia

    if engine == "openvino":
        import openvino

        openvino.Core().available_devices  # noqa: B018  # the plugin's own start, as its peers have it
    assert intarsia.load
    return measured(lambda: intarsia.load(folder / f"{engine}.intarsia"))


def load_openvino(form: str, folder: Path, wish: argparse.Namespace) -> dict[str, float]:
    import numpy as np
    import openvino

    core = openvino.Core()
    core.available_devices  # noqa: B018
    if form == "ir":
        return measured(lambda: core.compile_model(folder / "model.xml", "CPU", OPENVINO))
    array = np.memmap(folder / "model.blob", np.uint8, "c")
    tensor = openvino.Tensor(array, shared_memory=True)
    return measured(lambda: core.import_model(tensor, "CPU", OPENVINO))


def load_onnxruntime(folder: Path, wish: argparse.Namespace) -> dict[str, float]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    path = str(folder / "optimised.onnx")
    return measured(lambda: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]))


def imports(folder: Path, wish: argparse.Namespace) -> dict[str, float]:
    """What a process that loads imports besides torch."""
    import torch  # noqa: F401

    def load() -> Any:
        import intarsia

        return intarsia.load

    return measured(load)


def compile_once(folder: Path, wish: argparse.Namespace) -> dict[str, float]:
    import torch

    import intarsia
    import intarsia.compiler
    from intarsia.capture.export import capture
    from intarsia.engines import OnnxRuntime, OpenVINO

    thing, built = specimen(wish), [0]
    for kind in (OpenVINO, OnnxRuntime):

        def build(self: Any, net: Any, old: Any = kind.build) -> Any:
            built[0] += 1
            return old(self, net)

        kind.build = build  # type: ignore[method-assign]
    with torch.no_grad():
        thing.model(*thing.args, **thing.kwargs)
    figures = measured(lambda: intarsia.compile(thing.model, thing.args, thing.kwargs))
    export = measured(lambda: capture(thing.model, thing.args, thing.kwargs))
    return {**figures, "builds": built[0], "export_s": export["s"]}


STEPS: dict[str, Any] = {
    "make_openvino": lambda folder, wish: make("openvino", folder, wish),
    "make_onnxruntime": lambda folder, wish: make("onnxruntime", folder, wish),
    "load_openvino blob": lambda folder, wish: load_openvino("blob", folder, wish),
    "load_openvino IR": lambda folder, wish: load_openvino("ir", folder, wish),
    "load_openvino intarsia": lambda folder, wish: load_ours("openvino", folder, wish),
    "load_onnxruntime optimised": load_onnxruntime,
    "load_onnxruntime intarsia": lambda folder, wish: load_ours("onnxruntime", folder, wish),
    "imports": imports,
    "compile": compile_once,
}


def report_loads(found: dict[str, list[dict[str, float]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Loading: seconds, processor seconds, growth of the peak, whole peak")
    for column in ("", "s", "ratio", "CPU s", "ratio", "grows MB", "ratio", "peak MB"):
        table.add_column(column, justify="right" if column else "left")
    for name, figures in found.items():
        engine = name.removeprefix("load_").split()[0]
        base = found["load_openvino blob" if engine == "openvino" else "load_onnxruntime optimised"]
        row = [name.removeprefix("load_")]
        for key, digits in (("s", 3), ("cpu_s", 2), ("mb", 0)):
            own = statistics.median(item[key] for item in figures)
            row += [f"{own:.{digits}f}", f"{own / statistics.median(item[key] for item in base):.2f}"]
        table.add_row(*row, f"{statistics.median(item['peak_mb'] for item in figures):.0f}")
    Console(width=120).print(table)


def report_imports(found: list[dict[str, float]]) -> None:
    took, cpu = (statistics.median(item[key] for item in found) for key in ("s", "cpu_s"))
    print(f"import of the load path, beyond torch's: {took:.2f} s (CPU {cpu:.2f})")


def report_compiles(cold: list[dict[str, float]], warm: list[dict[str, float]]) -> None:
    from rich.console import Console

    first, second = (statistics.median(item["s"] for item in items) for items in (cold, warm))
    cpu = statistics.median(i["cpu_s"] for i in warm) / statistics.median(i["cpu_s"] for i in cold)
    export = statistics.median(item["export_s"] for item in warm)
    Console(width=120).print(
        f"compile: first {first:.2f} s ({cold[0]['builds']:.0f} engines built), again in a new process"
        f" {second:.2f} s ({warm[0]['builds']:.0f} built): ratio {second / first:.2f} (CPU {cpu:.2f});"
        f" torch.export alone takes {export:.2f} s"
    )


if __name__ == "__main__":
    main()

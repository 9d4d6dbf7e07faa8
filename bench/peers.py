"""One model measured against its peers, in a process of its own: `python -m bench.peers`.

What is known is written after each stage, so that a limit on time loses only what was not reached.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from bench.specimens import specimen
from torch.utils import _pytree as pytree

from intarsia.cache.machine import machine_key, package_version
from intarsia.choose import Measured
from intarsia.choose.measured import Objective
from intarsia.choose.race import race_plans
from intarsia.cli.zoo import Specimen
from intarsia.compare import relative_error
from intarsia.compiler import compile
from intarsia.graph.plan import Plan
from intarsia.timing import race

Timed = Callable[[], object]
OURS, FIXED, EAGER = "intarsia", "intarsia, fixed order", "eager"
SEARCHED, TOLERANT = "intarsia, longer search", "intarsia, tolerance"
OWN = (FIXED, OURS, SEARCHED, TOLERANT)
PEERS = (
    EAGER,
    "torch.onnx + ONNX Runtime",
    "OpenVINO's importer",
    "torch.compile",
    "torch.compile, freezing",
)
_PAUSE_S = 0.05  # more than `timing.PAUSE_S`: some peers let their threads spin for long


@dataclass(frozen=True)
class Wish:
    """What to measure: the model, its size, rounds of the race, whether Inductor runs too.

    With a `batch` the example is repeated so many times; for "throughput" several threads call at once, and
    times are a call's share of them.

    `budget_s` is what a longer search may take, besides the default one, and `tolerance` what results may be
    off by in one more of our plans; with 0 there is none.
    """

    name: str
    full: bool = True
    rounds: int = 40
    budget_s: float = 60.0
    race_s: float = 30.0
    inductor: bool = True
    tolerance: float = 0.0
    batch: int = 1
    objective: Objective = "latency"


def measure(wish: Wish, out: Path) -> None:
    """Measure a model and write what was found to `out`, stage by stage."""
    warnings.filterwarnings("ignore")
    thing = _batched(specimen(wish.name, full=wish.full), wish.batch)
    with torch.no_grad():
        expected = thing.model(*thing.args, **thing.kwargs)
    facts: dict[str, Any] = {
        "name": wish.name,
        "full": wish.full,
        "batch": wish.batch,
        "objective": wish.objective,
        "weights": sum(p.numel() for p in thing.model.parameters()),
        "machine": machine_key(),
        "versions": {m: package_version(m) for m in ("torch", "onnxruntime", "openvino", "transformers")},
        "peers": {},
        "complete": False,
    }
    usual = {} if wish.objective == "latency" else {"partition": Measured(wish.objective)}
    makers: dict[str, Callable[[], Timed]] = {
        EAGER: lambda: lambda: thing.model(*thing.args, **thing.kwargs),
        FIXED: lambda: _ours(thing, facts, "plan_fixed", partition="dependency"),
        OURS: lambda: _ours(thing, facts, "plan", **usual),
        PEERS[1]: lambda: _onnxruntime(thing),
        PEERS[2]: lambda: _openvino(thing),
    }
    if wish.budget_s:
        longer = Measured(wish.objective, budget_s=wish.budget_s)
        makers[SEARCHED] = lambda: _ours(thing, facts, "plan_searched", partition=longer)
    if wish.tolerance:
        makers[TOLERANT] = lambda: _ours(thing, facts, "plan_tolerant", tolerance=wish.tolerance)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        # As on a machine that knows nothing, but patterns are measured; and no program is kept, or the second
        # compile of the fixed order would build nothing.
        os.environ |= {"INTARSIA_CACHE": folder, "INTARSIA_CACHE_GB": "0"}
        makers[FIXED]()
        calls = _made(makers, facts, expected)
        start = time.perf_counter()
        _ours(thing, facts, "plan_again", **usual)
        facts["compile_again_s"] = time.perf_counter() - start
    _race(calls, wish, facts)
    _write(facts, out)
    if wish.inductor:
        # Last, since each may take minutes; the race is then run anew with everybody in it.
        inductor = {
            PEERS[3]: lambda: _inductor(thing, {}),
            PEERS[4]: lambda: _inductor(thing, {"freezing": True}),
        }
        calls |= _made(inductor, facts, expected)
        _race(calls, wish, facts)
    facts["complete"] = True
    _write(facts, out)


def _made(
    makers: Mapping[str, Callable[[], Timed]], facts: dict[str, Any], expected: object
) -> dict[str, Timed]:
    """The peers that can be made: seconds that it took, and how far the answer is off eager's."""
    made: dict[str, Timed] = {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            with torch.no_grad():
                call = make()
                answer = call()
        except Exception as error:  # a peer's failure is a result, not ours to hide or to die of
            said = next(iter(str(error).splitlines()), "")
            facts["peers"][name] = {"failed": f"{type(error).__name__}: {said}"[:300]}
            continue
        facts["peers"][name] = {"compile_s": time.perf_counter() - start, "error": _error(answer, expected)}
        made[name] = call
    return made


def _race(calls: Mapping[str, Timed], wish: Wish, facts: dict[str, Any]) -> None:
    if wish.objective == "throughput":
        took = race_plans(calls, wish.objective, rounds=wish.rounds, budget_s=wish.race_s)
    else:
        with torch.no_grad():
            timings = race(calls, rounds=wish.rounds, budget_s=wish.race_s, warmup=1, pause_s=_PAUSE_S)
        took = {name: timing.seconds for name, timing in timings.items()}
    for name, seconds in took.items():
        facts["peers"][name] |= {
            "median_ms": statistics.median(seconds) * 1e3,
            "best_ms": min(seconds) * 1e3,
            "rounds": len(seconds),
        }


def _batched(thing: Specimen, times: int) -> Specimen:
    """The example with its first dimension repeated."""

    def repeated(value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return value.repeat(times, *[1] * (value.ndim - 1))

    args, kwargs = pytree.tree_map(repeated, (thing.args, thing.kwargs))
    return replace(thing, args=args, kwargs=kwargs) if times > 1 else thing


def _error(answer: object, expected: object) -> float | None:
    """By tensors in order, since an importer may drop the nesting; None where they do not correspond."""
    ours = [x for x in pytree.tree_leaves(answer) if isinstance(x, torch.Tensor)]
    theirs = [x for x in pytree.tree_leaves(expected) if isinstance(x, torch.Tensor)]
    if len(ours) != len(theirs) or any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return None
    return relative_error(ours, theirs)


def _ours(thing: Specimen, facts: dict[str, Any], key: str, **asked: Any) -> Timed:
    fast = compile(thing.model, thing.args, thing.kwargs, **asked)
    plan = fast.plan
    facts[key] = json.loads(plan.to_json()) if isinstance(plan, Plan) else {}  # a model in parts has none
    facts[key]["text"] = str(plan)
    return lambda: fast(*thing.args, **thing.kwargs)


def _tensors(thing: Specimen) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((thing.args, thing.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _onnxruntime(thing: Specimen) -> Timed:
    import onnxruntime

    program = torch.onnx.export(thing.model, thing.args, kwargs=thing.kwargs, dynamo=True, verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"intarsia-bench-{os.getpid()}.onnx"
    try:
        program.save(str(path))
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    finally:
        for file in (path, path.with_name(path.name + ".data")):
            file.unlink(missing_ok=True)
    names = [given.name for given in session.get_inputs()]
    feed = dict(zip(names, [tensor.numpy() for tensor in _tensors(thing)], strict=True))
    return lambda: [torch.from_numpy(array) for array in session.run(None, feed)]


def _openvino(thing: Specimen) -> Timed:
    import inspect

    import openvino

    given: Any = thing.args
    if thing.kwargs:
        bound = inspect.signature(thing.model.forward).bind(*thing.args, **thing.kwargs)
        given = dict(bound.arguments)
    model = openvino.convert_model(thing.model, example_input=given)
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    if isinstance(given, dict):
        feed: Any = {name: value.numpy() for name, value in given.items() if isinstance(value, torch.Tensor)}
    else:
        feed = [tensor.numpy() for tensor in _tensors(thing)]
    return lambda: [torch.from_numpy(array) for array in compiled(feed, share_inputs=True).values()]


def _inductor(thing: Specimen, options: dict[str, Any]) -> Timed:
    torch._dynamo.reset()
    fast = torch.compile(thing.model, options=options)
    return lambda: fast(*thing.args, **thing.kwargs)


def _write(facts: Mapping[str, Any], out: Path) -> None:
    draft = out.with_suffix(".part")
    draft.write_text(json.dumps(facts, indent=1))
    draft.replace(out)


def command(wish: Wish, out: Path) -> list[str]:
    """The command line that measures one model."""
    return [sys.executable, "-m", "bench.peers", json.dumps(asdict(wish)), str(out)]


if __name__ == "__main__":
    measure(Wish(**json.loads(sys.argv[1])), Path(sys.argv[2]))

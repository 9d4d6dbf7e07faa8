"""One model measured against its peers, in a process of its own: `python -m bench.peers`.

What is known is written after each stage, so that a limit on time loses only what was not reached.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
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
from intarsia.cli.bench import as_peer
from intarsia.cli.zoo import Specimen
from intarsia.compare import relative_error
from intarsia.engines import MNN
from intarsia.graph.plan import Plan
from intarsia.timing import race

Timed = Callable[[], object]
Peer = Callable[[Specimen], object]  # the model as a peer runs it, called with a specimen's inputs
_MODULES = ("torch", "onnxruntime", "openvino", "MNN", "transformers")
OURS, FIXED, EAGER = "intarsia", "intarsia, fixed order", "eager"
SEARCHED, TOLERANT = "intarsia, longer search", "intarsia, tolerance"
OWN = (FIXED, OURS, SEARCHED, TOLERANT)
PEERS = (
    EAGER,
    "torch.onnx + ONNX Runtime",
    "OpenVINO's importer",
    "torch.onnx + MNN",
    "torch.compile",
    "torch.compile, freezing",
)
_PAUSE_S = 0.05  # more than `timing.PAUSE_S`: some peers let their threads spin for long


@dataclass(frozen=True)
class Wish:
    """What to measure: the model, its size, rounds of the race, whether Inductor runs too.

    With a `batch` the example is repeated so many times; for "throughput" several threads call at once, and
    times are a call's share of them. With `padded` rows there is a mask of padding; if they are `varying`,
    batch and length vary, and what is timed is three calls: of the whole length, a half and a quarter.

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
    padded: int = 0
    varying: bool = False


def measure(wish: Wish, out: Path) -> None:
    """Measure a model and write what was found to `out`, stage by stage."""
    warnings.filterwarnings("ignore")
    thing = specimen(wish.name, full=wish.full)
    thing = thing.padded(wish.padded, varying=wish.varying) if wish.padded else thing.repeated(wish.batch)
    things = [thing, thing.shortened(2), thing.shortened(4)] if wish.varying else [thing]
    with torch.no_grad():
        expected = [one.model(*one.args, **one.kwargs) for one in things]
    facts: dict[str, Any] = {
        "name": wish.name,
        "full": wish.full,
        "batch": wish.padded or wish.batch,
        "padded": wish.padded,
        "varying": wish.varying,
        "objective": wish.objective,
        "weights": sum(p.numel() for p in thing.model.parameters()),
        "machine": machine_key(),
        "versions": {m: package_version(m) for m in _MODULES},
        "peers": {},
        "complete": False,
    }
    usual = {} if wish.objective == "latency" else {"partition": Measured(wish.objective)}
    makers: dict[str, Callable[[], Peer]] = {
        EAGER: lambda: _called(thing.model),
        FIXED: lambda: _ours(thing, facts, "plan_fixed", partition="dependency"),
        OURS: lambda: _ours(thing, facts, "plan", **usual),
        PEERS[1]: lambda: _onnxruntime(thing),
        PEERS[2]: lambda: _openvino(thing),
        PEERS[3]: lambda: _mnn(thing),
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
        calls = _made(makers, facts, things, expected)
        start = time.perf_counter()
        _ours(thing, facts, "plan_again", **usual)
        facts["compile_again_s"] = time.perf_counter() - start
    _race(calls, wish, facts)
    _write(facts, out)
    if wish.inductor:
        # Last, since each may take minutes; the race is then run anew with everybody in it.
        inductor = {
            PEERS[4]: lambda: _inductor(thing, {}),
            PEERS[5]: lambda: _inductor(thing, {"freezing": True}),
        }
        calls |= _made(inductor, facts, things, expected)
        _race(calls, wish, facts)
    facts["complete"] = True
    _write(facts, out)


def _made(
    makers: Mapping[str, Callable[[], Peer]],
    facts: dict[str, Any],
    things: Sequence[Specimen],
    expected: object,
) -> dict[str, Timed]:
    """The peers that can be made: seconds that it took, and how far the answer is off eager's."""
    made: dict[str, Timed] = {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            with torch.no_grad():
                call = partial(_all_of, make(), things)
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


def _all_of(peer: Peer, things: Sequence[Specimen]) -> list[object]:
    return [peer(thing) for thing in things]


def _called(function: Callable[..., object]) -> Peer:
    return lambda thing: function(*thing.args, **thing.kwargs)


def _error(answer: object, expected: object) -> float | None:
    """By tensors in order, since an importer may drop the nesting; None where they do not correspond."""
    ours = [x for x in pytree.tree_leaves(answer) if isinstance(x, torch.Tensor)]
    theirs = [x for x in pytree.tree_leaves(expected) if isinstance(x, torch.Tensor)]
    if len(ours) != len(theirs) or any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return None
    return relative_error(ours, theirs)


def _ours(thing: Specimen, facts: dict[str, Any], key: str, **asked: Any) -> Peer:
    fast = thing.compile(**asked)
    plan = fast.plan
    facts[key] = json.loads(plan.to_json()) if isinstance(plan, Plan) else {}  # a model in parts has none
    facts[key]["text"] = str(plan)
    return _called(fast)


def _tensors(thing: Specimen) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((thing.args, thing.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@contextmanager
def _exported(thing: Specimen) -> Iterator[Path]:
    """The file that torch's exporter makes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        thing.export_onnx(path)
        yield path


def _onnxruntime(thing: Specimen) -> Peer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with _exported(thing) as path:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(thing: Specimen) -> list[torch.Tensor]:
        feed = dict(zip(names, [tensor.numpy() for tensor in _tensors(thing)], strict=True))
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run


def _mnn(thing: Specimen) -> Peer:
    """MNN by its own converter."""
    with _exported(thing) as path:
        return _called(as_peer(MNN().open(path)))


def _bound(thing: Specimen) -> Any:
    """The inputs by name where some are given so, and else in order."""
    if not thing.kwargs:
        return thing.args
    return dict(inspect.signature(thing.model.forward).bind(*thing.args, **thing.kwargs).arguments)


def _openvino(thing: Specimen) -> Peer:
    import openvino

    model = openvino.convert_model(thing.model, example_input=_bound(thing))
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)

    def run(thing: Specimen) -> list[torch.Tensor]:
        given = _bound(thing)
        if isinstance(given, dict):
            feed: Any = {k: value.numpy() for k, value in given.items() if isinstance(value, torch.Tensor)}
        else:
            feed = [tensor.numpy() for tensor in _tensors(thing)]
        return [torch.from_numpy(array) for array in compiled(feed, share_inputs=True).values()]

    return run


def _inductor(thing: Specimen, options: dict[str, Any]) -> Peer:
    torch._dynamo.reset()
    return _called(torch.compile(thing.model, options=options))


def _write(facts: Mapping[str, Any], out: Path) -> None:
    draft = out.with_suffix(".part")
    draft.write_text(json.dumps(facts, indent=1))
    draft.replace(out)


def command(wish: Wish, out: Path) -> list[str]:
    """The command line that measures one model."""
    return [sys.executable, "-m", "bench.peers", json.dumps(asdict(wish)), str(out)]


if __name__ == "__main__":
    measure(Wish(**json.loads(sys.argv[1])), Path(sys.argv[2]))

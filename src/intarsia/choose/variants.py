"""Options of engines that change speed and not results, worth measuring beside the usual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from intarsia.choose.measured import Measured, Objective
from intarsia.engines import Engine, Inductor, OnnxRuntime, OpenVINO, PyTorch
from intarsia.engines.inductor import GPU_REWRITES


def usual(engine: Engine, objective: Objective) -> Engine:
    """The engine with what an objective asks of it: spinning threads stand in the way of other calls."""
    if objective == "throughput" and isinstance(engine, OnnxRuntime) and engine.spinning is None:
        return replace(engine, spinning=False)
    return engine


def variants(engine: Engine, measured: Measured, rewrites: Sequence[str] = ()) -> list[tuple[str, Engine]]:
    """Other options for an engine, each with the words that tell it apart.

    Options that the user gave stay: only what stands at its default is varied. `rewrites` are those of
    graphs that would change something: PyTorch, which makes none by default, is tried with them; Inductor,
    which makes them, without, and with a budget without each of them, too.

    >>> [words for words, _ in variants(OnnxRuntime(), Measured(budget_s=60))]
    ['not spinning']
    """
    if measured.candidates is not None:
        return [(_words(other, engine), other) for other in measured.candidates if other.name == engine.name]
    threads = torch.get_num_threads()
    found: list[tuple[str, Engine]] = []
    if isinstance(engine, OnnxRuntime) and engine.device == "cpu":
        # It pays where other programs want the cores, too, which is not the common case.
        if measured.objective == "latency" and engine.spinning is None and measured.budget_s is not None:
            found.append(("not spinning", replace(engine, spinning=False)))
        if measured.objective == "throughput" and engine.threads is None and threads > 1:
            found.append(("1 thread a call", replace(engine, threads=1)))
    if isinstance(engine, PyTorch) and not engine.rewrites and rewrites:
        found.append((rewrites[-1], replace(engine, rewrites=tuple(rewrites))))
    if isinstance(engine, Inductor) and engine.rewrites is None and rewrites:
        found.append(("no rewrites", replace(engine, rewrites=())))
        if measured.budget_s is not None:
            for name in rewrites:
                others = tuple(other for other in GPU_REWRITES if other != name)
                found.append((f"without {name}", replace(engine, rewrites=others)))
    if isinstance(engine, OpenVINO) and measured.objective == "throughput" and not engine.options:
        streams = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": str(threads)}
        found.append((f"{threads} streams", replace(engine, options=streams)))
    if measured.objective == "latency" and threads > 2 and getattr(engine, "threads", 0) is None:
        found.append((f"{threads // 2} threads", _with_threads(engine, threads // 2)))
    return found


def _with_threads(engine: Engine, threads: int) -> Engine:
    assert isinstance(engine, OnnxRuntime | OpenVINO)
    return replace(engine, threads=threads)


def _words(other: Engine, usual: Engine) -> str:
    """What of an engine's options differs from the usual ones."""
    fields: Sequence[str] = list(getattr(other, "__dataclass_fields__", {}))
    differing = [f"{name}={getattr(other, name)}" for name in fields if _differs(other, usual, name)]
    return ", ".join(differing) or "as given"


def _differs(one: Engine, other: Engine, name: str) -> bool:
    return bool(getattr(one, name, None) != getattr(other, name, None))

"""Runs OpInfo samples through converters and engines: each runs, is refused with a reason, or is WRONG.

python -m tests.convert.harness --op relu --dtype float32 --engine onnxruntime
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.convert import drivers
from tests.convert.samples import (
    DTYPES,
    LIMIT,
    MORE_DTYPES,
    OPINFO_MISSING,
    Case,
    cases,
    dtypes_of,
    find_ops,
    op_infos,
    tolerance,
)
from tests.convert.sums import ADDS_UP, in_any_order
from torch import fx

from intarsia.convert import convert
from intarsia.convert.interpreter import NodeError
from intarsia.errors import EngineError, GuardError, IntarsiaError

RUNS, REFUSED, WRONG = "runs", "refused", "WRONG"


@dataclass(frozen=True)
class Outcome:
    """What became of a case on an engine; `reason` is empty where it runs."""

    case: Case
    engine: str
    verdict: str
    reason: str = ""
    network: str = ""


def judge(case: Case, engine: str) -> Outcome:
    """Convert, build, run and compare one case."""
    try:
        net = convert(case.lowered or case.module)
    except NodeError as error:
        return Outcome(case, engine, REFUSED, error.reason)
    except IntarsiaError as error:
        return Outcome(case, engine, REFUSED, str(error))
    text = str(net)
    try:
        program = drivers.build(engine, net)
    except EngineError as error:
        return Outcome(case, engine, REFUSED, drivers.told(error), text)
    try:
        results = program(*case.inputs)
    except GuardError as error:  # PyTorch answers such a call
        return Outcome(case, engine, REFUSED, f"left to PyTorch: {error}", text)
    except Exception as error:  # the engine took the network, so an error now reaches the user
        return Outcome(case, engine, WRONG, f"failed at run time: {drivers.told(error)}", text)
    difference = differs(case, results)
    return Outcome(case, engine, WRONG if difference else RUNS, difference, text)


def differs(case: Case, results: tuple[torch.Tensor, ...], *, any_order: bool = False) -> str:
    """How the results differ from eager's: type, shape, values; empty if they do not.

    Eager rounds on the way where engines round once (halves), or in another order (long sums of terms
    that cancel): an element that agrees with what eager computes in float64, within the same tolerances,
    or is at least as near to that as eager's own, is right as well. With `any_order` so is, of operators that
    add up, one that adding in another order gives (`sums`).
    """
    difference = _kinds_differ(results, case.expected)
    if difference or case.unset:
        return difference
    difference = _values_differ(case, results)
    if not difference or not any(t.dtype.is_floating_point for t in case.expected):
        return difference
    exact = in_double(case)
    if exact is None:
        return difference
    results = _no_worse(case, results, exact)
    difference = _values_differ(case, results)
    if not difference or not any_order or op_infos()[case.op].name not in ADDS_UP:
        return difference
    module, inputs = widened(case)
    return _values_differ(case, in_any_order(module, inputs, results, case.expected))


def _kinds_differ(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    if len(results) != len(expected):
        return f"{len(results)} results where eager makes {len(expected)}"
    for i, (have, want) in enumerate(zip(results, expected, strict=True)):
        if have.dtype != want.dtype or have.shape != want.shape:
            return f"result {i} is {have.dtype}{list(have.shape)}, eager's {want.dtype}{list(want.shape)}"
    return ""


def _values_differ(case: Case, results: Sequence[torch.Tensor]) -> str:
    for i, (have, want) in enumerate(zip(results, case.expected, strict=True)):
        rtol, atol = tolerance(case.op, want.dtype)
        try:
            torch.testing.assert_close(have, want, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"result {i}: " + " ".join(str(error).split())[:300]
    return ""


def _no_worse(
    case: Case, results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The results, with eager's element wherever ours is as good in the light of the exact one."""
    settled = []
    for have, want, truth in zip(results, case.expected, exact, strict=True):
        if want.dtype.is_floating_point:
            rtol, atol = tolerance(case.op, want.dtype)
            good = torch.isclose(have, truth.to(want.dtype), rtol=rtol, atol=atol, equal_nan=True)
            good |= (have.double() - truth).abs() <= (want.double() - truth).abs()
            have = torch.where(good, want, have)
        settled.append(have)
    return tuple(settled)


NARROW = {torch.float16, torch.bfloat16, torch.float32}


def in_double(case: Case) -> tuple[torch.Tensor, ...] | None:
    """What eager makes of the case in float64; None where the operator takes no float64."""
    module, inputs = widened(case)
    try:
        with torch.no_grad():
            results = fx.Interpreter(module).run(*inputs)
    except RuntimeError:
        return None
    return tuple(results)


def widened(case: Case) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The case in float64."""
    inputs = [t.double() if t.dtype in NARROW else t.clone() for t in case.inputs]
    module = fx.GraphModule(case.module, copy.deepcopy(case.module.graph))
    for node in module.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _widened)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _widened)
    return module, inputs


def _widened(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in NARROW else argument


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="names of ops (all, if none)")
    parser.add_argument("--op", action="append", default=[], help="the same")
    parser.add_argument("--dtype", action="append", choices=[*DTYPES, *MORE_DTYPES], default=[])
    parser.add_argument("--engine", action="append", choices=drivers.ALL_ENGINES, default=[])
    parser.add_argument("--limit", type=int, default=LIMIT, help="samples an op and dtype")
    parser.add_argument("--no-core", action="store_true", help="composite level only")
    parser.add_argument("--quiet", action="store_true", help="say nothing of ops that run entirely")
    parser.add_argument("--show", type=int, default=3, help="wrong samples shown an op, dtype and engine")
    options = parser.parse_args()
    if OPINFO_MISSING:
        sys.exit(OPINFO_MISSING)
    torch.set_num_threads(1)
    wanted = [*options.ops, *options.op]
    names = [name for given in wanted for name in find_ops(given)] if wanted else list(op_infos())
    if not names:
        sys.exit(f"no OpInfo is called {' or '.join(wanted)}")
    total: Counter[tuple[str, str, str]] = Counter()
    for name in names:
        for dtype in dtypes_of(op_infos()[name], more=bool(options.dtype)):
            if options.dtype and dtype not in options.dtype:
                continue
            started = time.perf_counter()
            found = list(cases(name, dtype, core=0 if options.no_core else LIMIT, limit=options.limit))
            for engine in options.engine or drivers.ALL_ENGINES:
                outcomes = [judge(case, engine) for case in found]
                total.update((dtype, engine, o.verdict) for o in outcomes)
                show(f"{name:32} {dtype:8} {engine:11}", outcomes, options, time.perf_counter() - started)
    print()
    for dtype, engine in dict.fromkeys(key[:2] for key in total):
        runs, refused, wrong = (total[dtype, engine, verdict] for verdict in (RUNS, REFUSED, WRONG))
        share = 100 * runs / max(1, runs + refused + wrong)
        print(f"{dtype:8} {engine:11} {share:5.1f} % run: {runs} run, {refused} refused, {wrong} WRONG")


def show(head: str, outcomes: list[Outcome], options: argparse.Namespace, seconds: float) -> None:
    """One line of counts, then the reasons by number and the wrong samples."""
    count = Counter(o.verdict for o in outcomes)
    if options.quiet and not count[REFUSED] and not count[WRONG]:
        return
    print(f"{head} {count[RUNS]:3} run {count[REFUSED]:3} refused {count[WRONG]:3} WRONG  ({seconds:.1f} s)")
    reasons = Counter((str(o.case.target), o.reason) for o in outcomes if o.verdict == REFUSED)
    for (target, reason), number in reasons.most_common():
        print(f"    {number:3} x refused ({target}): {reason}")
    for outcome in [o for o in outcomes if o.verdict == WRONG][: options.show]:
        shapes = ", ".join(f"{t.dtype}{list(t.shape)}".removeprefix("torch.") for t in outcome.case.inputs)
        print(f"    WRONG {outcome.case}: {outcome.reason}")
        print(f"      inputs {shapes}")
        nodes = [n for n in outcome.case.module.graph.nodes if n.op == "call_function"]
        for node in nodes[:6]:
            print(f"      {node.format_node()}")
        for line in outcome.network.splitlines():
            print(f"      | {line}")


if __name__ == "__main__":
    main()

"""Converters at the edges of their dtypes: OpInfo's samples with special values put in.

python -m tests.convert.edges --dtype float32 --engine onnxruntime max_pool2d

A call is *equal* to eager's, *refused* before it is built or left to PyTorch by a guard, or WRONG: another
answer, or an answer where eager raises.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tests.commit import commit
from tests.convert import drivers
from tests.convert.harness import REFUSED, RUNS, WRONG, Outcome, differs
from tests.convert.measure import Key, Tally, load, save
from tests.convert.samples import OPINFO_MISSING, Case, cases, dtypes_of, find_ops, op_infos
from torch import fx

from intarsia.convert import convert
from intarsia.errors import EngineError, GuardError, IntarsiaError

INF, NAN = math.inf, math.nan
DTYPES = ("float32", "int64", "int32", "bool", "float16")
# Eager itself ends the process, or asks for more memory than there is.
KILLS_EAGER = {
    "div.trunc_rounding": "eager divides the least integer by -1, and the processor ends the process",
    "repeat_interleave": "eager would repeat 2**62 times",
    "bincount": "eager would count 2**62 kinds",
    "combinations": "its size grows with the values",
    "nn.functional.one_hot": "the number of classes is read from the values",
}
# The memory they return is not set.
UNDEFINED = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
}  # fmt: skip


@dataclass(frozen=True)
class Edge:
    """Special values, put into one input of a case."""

    name: str
    values: tuple[float, ...]
    everywhere: bool = False  # in all elements in turn, instead of a few


def edges_of(dtype: torch.dtype) -> list[Edge]:
    """What a dtype has at its edges."""
    if dtype == torch.bool:
        return [Edge("all true", (True,), True), Edge("all false", (False,), True)]
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return [
            Edge("NaN", (NAN,)),
            Edge("infinity", (INF, -INF)),
            Edge("minus infinity alone", (-INF,), True),
            Edge("zeros", (0.0, -0.0), True),
            Edge("tiny", (info.tiny, -info.tiny, info.tiny / 8, -info.tiny * info.eps), True),
            Edge("huge", (info.max, -info.max)),
            Edge(
                "whole", (2.0**24, -(2.0**24) - 2, 2.0**31, 2.0**53) if dtype != torch.float16 else (2048.0,)
            ),
        ]
    info_ = torch.iinfo(dtype)
    bits = tuple(v for v in (2**24 + 1, 2**31 - 1, 2**31, 2**31 + 5, 2**32, 2**53 + 1) if v <= info_.max)
    return [
        Edge("zero", (0,), True),
        Edge("negative", (-1,) if info_.min else (255,)),
        Edge("limits", (info_.min, info_.max)),
        Edge("bits", bits or (info_.max,)),
    ]


def with_edge(tensor: torch.Tensor, edge: Edge) -> torch.Tensor:
    """A copy that holds the values: everywhere in turn, or at a few places in the middle."""
    made = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = made.view(-1)
    if not flat.numel():
        return made
    values = torch.tensor(edge.values).to(tensor.dtype) if tensor.is_floating_point() else None
    filler = values if values is not None else torch.tensor(list(edge.values), dtype=tensor.dtype)
    places = torch.arange(flat.numel())
    if not edge.everywhere:
        places = places[flat.numel() // 2 :: 2][: len(edge.values)]
    flat[places] = filler[torch.arange(len(places)) % len(filler)]
    return made


def edge_cases(case: Case, only: Collection[str] = ()) -> Iterator[tuple[str, Case | None, Case]]:
    """(what was put where, the case with eager's answer or None where eager raises, the case)."""
    for place, tensor in enumerate(case.inputs):
        if tensor.dtype.is_complex:
            continue
        for edge in edges_of(tensor.dtype):
            if only and edge.name not in only:
                continue
            inputs = list(case.inputs)
            inputs[place] = with_edge(tensor, edge)
            named = f"{edge.name} in input {place}"
            changed = replace(case, inputs=tuple(inputs))
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = fx.Interpreter(case.module).run(*(t.clone() for t in inputs))
            except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
                yield named, None, changed
                continue
            yield named, replace(changed, expected=tuple(made)), changed


def judge_edges(case: Case, engine: str, only: Collection[str] = ()) -> Iterator[tuple[str, Outcome]]:
    """What becomes of each edge of a case; nothing where the engine does not take the operator at all."""
    try:
        net = convert(case.lowered or case.module)
        program = drivers.build(engine, net)
    except (IntarsiaError, EngineError) as error:
        yield "as it is", Outcome(case, engine, REFUSED, str(error))
        return
    for named, answered, changed in edge_cases(case, only):
        try:
            results = program(*(t.clone() for t in changed.inputs))
        except GuardError as error:
            yield named, Outcome(changed, engine, REFUSED, f"left to PyTorch: {error}")
            continue
        except Exception as error:  # the engine took the network, so an error now reaches the user
            said = f"failed at run time: {drivers.told(error)}"
            yield named, Outcome(changed, engine, RUNS if answered is None else WRONG, said)
            continue
        if answered is None:
            yield named, Outcome(changed, engine, WRONG, "answers where eager raises")
            continue
        difference = differs(answered, results, any_order=True)
        yield named, Outcome(changed, engine, WRONG if difference else RUNS, difference)


def judged(
    name: str, dtype: str, engine: str, samples: int, only: Collection[str] = ()
) -> Iterator[tuple[str, Outcome]]:
    """Some samples of an op at all edges, or at those named."""
    if name in KILLS_EAGER or op_infos()[name].name in UNDEFINED:
        return
    for case in _samples(name, dtype, samples):
        yield from judge_edges(case, engine, only)


@functools.lru_cache(maxsize=4)  # an engine after the other asks for the same
def _samples(name: str, dtype: str, count: int) -> list[Case]:
    return list(itertools.islice(cases(name, dtype, core=0, limit=count), count))


def tallied(name: str, dtype: str, engine: str, samples: int, only: Collection[str] = ()) -> Tally:
    """The verdicts on an op, and what is wrong in words."""
    tally = Tally(limit=samples, commit=commit())
    for named, outcome in judged(name, dtype, engine, samples, only):
        tally.own[outcome.verdict] += 1
        if outcome.verdict == WRONG:
            tally.wrong.append(f"{outcome.case} on {engine}, {named}: {outcome.reason}")
    return tally


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="names of ops (all, if none)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, default=[])
    parser.add_argument("--engine", action="append", choices=drivers.ALL_ENGINES, default=[])
    parser.add_argument("--edge", action="append", default=[], help="this edge alone")
    parser.add_argument("--samples", type=int, default=1, help="samples an op and dtype")
    parser.add_argument("--keep", type=Path, help="a JSON file to continue from and write to")
    options = parser.parse_args()
    if OPINFO_MISSING:
        sys.exit(OPINFO_MISSING)
    torch.set_num_threads(1)
    keep: Path | None = options.keep
    found = load(keep) if keep is not None and keep.exists() else {}
    names = [n for given in options.ops for n in find_ops(given)] if options.ops else list(op_infos())
    for name, dtype in itertools.product(names, options.dtype or DTYPES):
        if dtype not in dtypes_of(op_infos()[name]):
            continue
        for engine in options.engine or drivers.ALL_ENGINES:
            if (name, dtype, engine) in found:
                continue
            tally = tallied(name, dtype, engine, options.samples, options.edge)
            for line in tally.wrong:
                print(f"WRONG {line}", flush=True)
            found[name, dtype, engine] = tally
            if keep is not None:
                save(found, keep)
    for (dtype, engine), counts in summed(found).items():
        print(f"{dtype:8} {engine:11} {counts[RUNS]} equal, {counts[REFUSED]} left, {counts[WRONG]} WRONG")


def summed(tallies: dict[Key, Tally]) -> dict[tuple[str, str], Counter[str]]:
    """The verdicts on each dtype and engine."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for (_, dtype, engine), tally in tallies.items():
        found.setdefault((dtype, engine), Counter()).update(tally.own)
    return found


if __name__ == "__main__":
    main()

"""Every converter over PyTorch's own samples: it matches eager, or it refuses with a reason."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.convert import drivers
from tests.convert.harness import REFUSED, RUNS, Outcome, judge
from tests.convert.measure import measure, measure_all, share
from tests.convert.samples import DTYPES, LIMIT, OPINFO_MISSING, Case, cases, dtypes_of, op_infos
from torch import fx

from intarsia.convert import convert
from intarsia.network import Network

pytestmark = pytest.mark.skipif(bool(OPINFO_MISSING), reason=OPINFO_MISSING)
PAIRS = [(name, dtype) for name, op in op_infos().items() for dtype in dtypes_of(op)]
NOTHING = fx.GraphModule({}, fx.Graph())
GOALS = {"onnxruntime": 0.97, "openvino": 0.90}
RAN: dict[str, list[tuple[str, Network]]] = {engine: [] for engine in drivers.ALL_ENGINES}


@pytest.fixture(autouse=True)
def _one_thread_and_quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@functools.cache
def one_sample(name: str) -> list[Outcome]:
    """Always the same one: of float32 where there is one, and of another dtype on ONNX Runtime."""
    dtypes = dtypes_of(op_infos()[name])
    number = zlib.crc32(name.encode())
    asked = [(dtypes[0], drivers.ALL_ENGINES)] if dtypes else []
    if dtypes[1:]:
        asked.append((dtypes[1 + number % (len(dtypes) - 1)], ("onnxruntime",)))
    found = []
    for dtype, engines in asked:
        for case in cases(name, dtype, core=0, pick=number):
            for engine in engines:
                made = judge(case, engine)
                found.append(replace(made, case=named(case)))
                if made.verdict == RUNS:
                    RAN[engine].append((str(case), convert(case.module)))
    return found


def named(case: Case) -> Case:
    """A case by its name alone, since outcomes are kept."""
    return replace(case, module=NOTHING, inputs=(), expected=())


@pytest.mark.parametrize("name", op_infos())
def test_one_sample_of_every_op(name: str) -> None:
    for made in one_sample(name):
        assert made.verdict in (RUNS, REFUSED), f"{made.case} on {made.engine}: {made.reason}\n{made.network}"
        assert made.verdict == RUNS or made.reason, f"{made.case} on {made.engine} gives no reason"


# The least share of the samples above that run, by engine and kind of dtype; the rest PyTorch runs.
SHARES = {
    ("onnxruntime", "float32"): 0.96,
    ("openvino", "float32"): 0.93,
    ("onnxruntime", "halves"): 0.95,
    ("onnxruntime", "integers"): 0.96,
    ("onnxruntime", "bool"): 0.95,
}
GROUPS = {"float16": "halves", "bfloat16": "halves", "int32": "integers", "int64": "integers"}


@pytest.mark.parametrize(("engine", "group"), SHARES)
def test_most_of_those_samples_run(engine: str, group: str) -> None:
    """What runs must not become what is refused, one converter after the other, without anyone noticing."""
    found = [
        outcome
        for name in op_infos()
        for outcome in one_sample(name)
        if outcome.engine == engine and GROUPS.get(outcome.case.dtype, outcome.case.dtype) == group
    ]
    refused = [f"{o.case}: {o.reason}" for o in found if o.verdict != RUNS]
    assert len(found) > 40, f"only {len(found)} samples of {group}"
    assert 1 - len(refused) / len(found) >= SHARES[engine, group], "\n".join(refused)


@pytest.mark.parametrize("engine", drivers.ALL_ENGINES)
def test_what_runs_is_taken_when_asked(engine: str) -> None:
    """Compiling asks an engine first, and gives it only what it says to take."""
    for name in op_infos():
        one_sample(name)
    reasons = drivers.engine_of(engine).probe_all([net for _, net in RAN[engine]])
    refused = [f"{case}: {reason}" for (case, _), reason in zip(RAN[engine], reasons, strict=True) if reason]
    assert len(reasons) > (150 if engine == "mnn" else 300) and not refused, "\n".join(refused)


def test_enough_ops_are_covered() -> None:
    """A torch that traces OpInfo differently must not leave the test above empty."""
    some = list(op_infos())[::10]
    covered = [name for name in some if any(made.case.dtype == "float32" for made in one_sample(name))]
    assert len(covered) > 0.4 * len(some), f"only {len(covered)} of {len(some)} ops are covered"


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_all_samples(name: str, dtype: str) -> None:
    wrong = [
        line
        for tally in measure(name, dtype, drivers.ALL_ENGINES, LIMIT, 10_000).values()
        for line in tally.wrong
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
def test_most_samples_run() -> None:
    tallies = measure_all(op_infos(), ("float32", "int64", "bool"), core=0)
    for engine, goal in GOALS.items():
        runs, total = share(tally for key, tally in tallies.items() if key[2] == engine)
        assert total > 5000, f"only {total} samples"
        assert runs / total >= goal, f"{engine}: {runs} of {total} samples run"


def test_every_dtype_is_asked() -> None:
    assert {dtype for _, dtype in PAIRS} == set(DTYPES)

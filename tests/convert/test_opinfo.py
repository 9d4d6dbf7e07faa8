"""Every converter over PyTorch's own samples: it matches eager, or it refuses with a reason."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator

import pytest
import torch
from tests.convert import drivers
from tests.convert.harness import REFUSED, RUNS, judge
from tests.convert.measure import measure, measure_all, share
from tests.convert.samples import DTYPES, LIMIT, OPINFO_MISSING, Case, cases, dtypes_of, op_infos

pytestmark = pytest.mark.skipif(bool(OPINFO_MISSING), reason=OPINFO_MISSING)
PAIRS = [(name, dtype) for name, op in op_infos().items() for dtype in dtypes_of(op)]
GOALS = {"onnxruntime": 0.97, "openvino": 0.90}


@pytest.fixture(autouse=True)
def _one_thread_and_quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def check(case: Case, engine: str) -> None:
    outcome = judge(case, engine)
    assert outcome.verdict in (RUNS, REFUSED), f"{case} on {engine}: {outcome.reason}\n{outcome.network}"
    assert outcome.verdict == RUNS or outcome.reason, f"{case} on {engine} is refused without a reason"


@pytest.mark.parametrize("name", op_infos())
def test_one_sample_of_every_op(name: str) -> None:
    """Always the same one: of float32 where there is one, and of another dtype on ONNX Runtime."""
    dtypes = dtypes_of(op_infos()[name])
    number = zlib.crc32(name.encode())
    for case in cases(name, dtypes[0], core=0, pick=number) if dtypes else ():
        for engine in drivers.ENGINES:
            check(case, engine)
    for case in (
        cases(name, dtypes[1 + number % (len(dtypes) - 1)], core=0, pick=number) if dtypes[1:] else ()
    ):
        check(case, "onnxruntime")


def test_enough_ops_are_covered() -> None:
    """A torch that traces OpInfo differently must not leave the test above empty."""
    some = list(op_infos())[::10]
    covered = [name for name in some if "float32" in dtypes_of(op_infos()[name]) and _is_covered(name)]
    assert len(covered) > 0.4 * len(some), f"only {len(covered)} of {len(some)} ops are covered"


def _is_covered(name: str) -> bool:
    return any(True for _ in cases(name, "float32", core=0, pick=0))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_all_samples(name: str, dtype: str) -> None:
    wrong = [
        line
        for tally in measure(name, dtype, drivers.ENGINES, LIMIT, 10_000).values()
        for line in tally.wrong
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_most_samples_run() -> None:
    tallies = measure_all(op_infos(), ("float32", "int64", "bool"), core=0)
    for engine, goal in GOALS.items():
        runs, total = share(tally for key, tally in tallies.items() if key[2] == engine)
        assert total > 5000, f"only {total} samples"
        assert runs / total >= goal, f"{engine}: {runs} of {total} samples run"


def test_every_dtype_is_asked() -> None:
    assert {dtype for _, dtype in PAIRS} == set(DTYPES)

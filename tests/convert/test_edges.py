"""Every converter at the edges of its dtypes: equal to eager, eager's error, or left to PyTorch."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from tests.convert import drivers
from tests.convert.edges import DTYPES, Edge, edges_of, judged, with_edge
from tests.convert.harness import RUNS, WRONG
from tests.convert.samples import LIMIT, OPINFO_MISSING, dtypes_of, op_infos

pytestmark = pytest.mark.skipif(bool(OPINFO_MISSING), reason=OPINFO_MISSING)
PAIRS = [(name, dtype) for name, op in op_infos().items() for dtype in DTYPES if dtype in dtypes_of(op)]
# Every eighth op always: by a number made of its name, so that a new op moves no other.
SHARE = [name for name in op_infos() if zlib.crc32(name.encode()) % 8 == 0]


@pytest.fixture(autouse=True)
def _one_thread_and_quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def wrong(name: str, dtype: str, engine: str, samples: int) -> list[str]:
    found = list(judged(name, dtype, engine, samples))
    return [f"{o.case} on {engine}, {what}: {o.reason}" for what, o in found if o.verdict == WRONG]


@functools.cache
def one_sample(name: str, dtype: str) -> list[tuple[str, str]]:
    """(verdict, what to say of it) of one sample at each edge, on ONNX Runtime."""
    found = judged(name, dtype, "onnxruntime", 1)
    return [(o.verdict, f"{o.case}, {what}: {o.reason}") for what, o in found]


@pytest.mark.parametrize("name", SHARE)
def test_some_ops_at_their_edges(name: str) -> None:
    for dtype in ("float32", "int64"):
        if dtype in dtypes_of(op_infos()[name]):
            found = [said for verdict, said in one_sample(name, dtype) if verdict == WRONG]
            assert not found, "\n".join(found)


def test_edges_are_mostly_answered_by_the_engine() -> None:
    """That nothing is wrong must not come of everything being left."""
    counts: Counter[str] = Counter()
    for name in SHARE:
        if "float32" in dtypes_of(op_infos()[name]):
            counts.update(verdict for verdict, _ in one_sample(name, "float32"))
    assert counts.total() > 100 and counts[RUNS] > 0.85 * counts.total(), counts


@pytest.mark.full
@pytest.mark.parametrize("engine", drivers.ALL_ENGINES)
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_all_ops_at_their_edges(name: str, dtype: str, engine: str) -> None:
    assert not (found := wrong(name, dtype, engine, LIMIT)), "\n".join(found)


# Edges that engines once answered otherwise: equal, or left to PyTorch, since.
MENDED = {
    "_upsample_bilinear2d_aa": ("minus infinity alone",),
    "addcdiv": ("tiny",),
    "addr": ("huge",),
    "bucketize": ("NaN", "infinity", "whole", "limits"),
    "cdist": ("NaN", "infinity", "huge"),
    "div": ("tiny",),
    "lgamma": ("tiny",),
    "linalg.vector_norm": ("huge", "whole"),
    "masked.sum": ("whole",),
    "masked.cumsum": ("whole",),
    "narrow": ("limits", "bits"),
    "native_batch_norm": ("whole",),
    "native_group_norm": ("infinity", "minus infinity alone", "huge", "whole"),
    "native_layer_norm": ("minus infinity alone", "huge"),
    "nn.functional.adaptive_avg_pool3d": ("whole",),
    "nn.functional.avg_pool2d": ("limits",),
    "nn.functional.batch_norm": ("infinity", "minus infinity alone"),
    "nn.functional.embedding_bag": ("NaN", "zero", "huge", "whole"),
    "nn.functional.gelu": ("infinity",),
    "nn.functional.grid_sample": ("whole",),
    "nn.functional.group_norm": ("infinity", "minus infinity alone", "huge"),
    "nn.functional.interpolate": ("infinity", "minus infinity alone", "huge"),
    "nn.functional.layer_norm": ("huge",),
    "nn.functional.upsample_bilinear": ("infinity", "minus infinity alone"),
    "prod": ("huge",),
    "searchsorted": ("NaN", "infinity", "negative", "limits"),
    "std": ("huge",),
    "std_mean": ("minus infinity alone", "huge", "whole"),
    "sinc": ("tiny",),
    "tensor_split": ("limits",),
    "true_divide": ("tiny",),
    "var_mean": ("minus infinity alone", "whole"),
}


OTHER_DTYPES = {
    "bucketize": ("int64",),
    "nn.functional.avg_pool2d": ("int64",),
    "nn.functional.gelu": ("float16",),
}
# Of these the first samples see nothing of it.
SAMPLES = {
    "cdist": 8,
    "div": 8,
    "linalg.vector_norm": 40,
    "narrow": 8,
    "nn.functional.embedding_bag": 10,
    "prod": 40,
    "true_divide": 8,
}


@pytest.mark.parametrize("engine", drivers.ALL_ENGINES)
@pytest.mark.parametrize("op", MENDED)
def test_what_was_answered_otherwise(op: str, engine: str) -> None:
    samples = SAMPLES.get(op, 4)
    dtypes = ("float32", *OTHER_DTYPES.get(op, ()))
    for name in (name for name, info in op_infos().items() if info.name == op):
        for dtype in dtypes:
            found = [
                (e, o) for e, o in judged(name, dtype, engine, samples, MENDED[op]) if o.verdict == WRONG
            ]
            assert not found, f"{found[0][1].case} on {engine}, {found[0][0]}: {found[0][1].reason}"


def test_values_are_put_in() -> None:
    x = torch.ones(2, 3)
    assert with_edge(x, Edge("NaN", (float("nan"),))).isnan().sum() == 1
    assert torch.equal(with_edge(x, Edge("zeros", (0.0, -0.0), True)), torch.zeros(2, 3))
    assert torch.equal(x, torch.ones(2, 3))
    largest = torch.iinfo(torch.int64).max
    limits = next(edge for edge in edges_of(torch.int64) if edge.name == "limits")
    assert largest in with_edge(torch.ones(8, dtype=torch.int64), limits)

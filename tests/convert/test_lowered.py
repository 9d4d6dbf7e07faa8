"""Operators without a converter of their own run all the same: lowering takes them apart first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.convert.edges import judge_edges
from tests.convert.harness import RUNS, WRONG
from tests.convert.lowered import judge_samples
from tests.convert.samples import BEFORE_TORCH_2_12, OPINFO_MISSING, cases, op_infos

pytestmark = pytest.mark.skipif(bool(OPINFO_MISSING), reason=OPINFO_MISSING)
TAKEN_APART = [
    "argsort",
    "broadcast_tensors",
    "column_stack",
    "deg2rad",
    "diag",
    "diagflat",
    "dstack",
    "fliplr",
    "flipud",
    "hstack",
    "isneginf",
    "isposinf",
    "isreal",
    "msort",
    "nn.functional.channel_shuffle",
    "nn.functional.relu6",
    "outer",
    "rad2deg",
    "rot90",
    "trace",
    "vdot",
    "vstack",
    "einsum",
    "tensordot",
    "kron",
    "cross",
    "diff",
    "gradient",
    "quantile",
    "linalg.matrix_norm",
    "linalg.multi_dot",
    "masked.var",
    "special.entr",
    "nn.functional.cross_entropy",
    "nn.functional.cosine_similarity",
    "nn.functional.local_response_norm",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.normalize",
    "nn.functional.softmin",
    "nn.functional.triplet_margin_loss",
]
# With samples that torch's rules answer as the operator does at the edges of the dtype too.
SAME_AT_THE_EDGES = [
    "addr",
    "aminmax",
    "count_nonzero",
    "diag_embed",
    "isclose",
    "lerp",
    "linalg.cross",
    "nan_to_num",
    "nansum",
    "nn.functional.celu",
    "nn.functional.embedding_bag",
    "nn.functional.hardshrink",
    "nn.functional.logsigmoid",
    "nn.functional.pixel_unshuffle",
    "nn.functional.selu",
    "nn.functional.threshold",
    "sinc",
    "take",
    "take_along_dim",
    "xlogy",
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_names_are_of_this_torch() -> None:
    assert set(TAKEN_APART) <= set(op_infos())


@pytest.mark.openvino
@pytest.mark.parametrize("name", TAKEN_APART)
def test_taken_apart(name: str) -> None:
    if name == "quantile" and BEFORE_TORCH_2_12:
        pytest.skip("this torch's export takes no sample of it")
    verdicts = judge_samples(name, "float32", 1)
    assert verdicts["onnxruntime"] == [(RUNS, "")]
    assert [v for v in verdicts["openvino"] if v[0] == WRONG] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_AT_THE_EDGES)
def test_taken_apart_at_the_edges(name: str) -> None:
    (case, *_) = cases(name, "float32", core=0, pick=0, apart=True)
    verdicts = list(judge_edges(case, "onnxruntime"))
    assert verdicts
    assert [(what, o.reason) for what, o in verdicts if o.verdict == WRONG] == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("name", op_infos())
def test_nothing_lowered_is_wrong(name: str, dtype: str) -> None:
    if getattr(torch, dtype) not in op_infos()[name].dtypes:
        return
    if any(True for _ in cases(name, dtype, core=0, pick=0)):
        return  # has a converter of its own, and a test of that
    for engine, verdicts in judge_samples(name, dtype, 3).items():
        assert [v for v in verdicts if v[0] == WRONG] == [], engine

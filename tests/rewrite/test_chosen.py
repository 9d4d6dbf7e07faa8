"""A user's own patterns reach `compile`: as objects, in managers, through the shared managers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import OnnxRuntime, OpenVINO
from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.rewrite import (
    AnalysisPatternManager,
    PatternAnalyzer,
    PatternRewriter,
    RewritePatternManager,
    patterns_by_engine,
    rule,
)

X = torch.randn(2, 4)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sigmoid()).eval()
seen: list[str] = []


@rule(lambda op, x: op.Sigmoid(op.Relu(x)))
def noted(net: Network, x: Tensor) -> Tensor:
    seen.append("rule")
    return F.sigmoid(F.clip(x, 0.0, None))


class Noted(PatternRewriter):
    def __init__(self) -> None:
        super().__init__("noted_class", {"Sigmoid"}, separate_match_rewrite=True)

    def match(self, layer: Layer) -> bool:
        seen.append("class")
        return False


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    seen.clear()
    yield
    for manager in (RewritePatternManager.instance(), AnalysisPatternManager.instance()):
        for label in ("mine", "counts"):
            try:
                manager.remove(label)
            except RewriteError:
                continue


def run(rewrite: object) -> None:
    fast = intarsia.compile(MODEL, (X,), engines=["onnxruntime"], rewrite=rewrite, min_block_size=1)
    torch.testing.assert_close(fast(X), MODEL(X))
    assert not any("not rewritten" in note for note in fast.notes)


def test_objects_managers_and_names_in_one_list() -> None:
    manager = RewritePatternManager()
    manager.add("held", Noted(), 3)
    run(["identity", noted, manager])
    assert "rule" in seen and "class" in seen


def test_a_pattern_alone() -> None:
    run(noted)
    assert "rule" in seen


def test_the_shared_manager_is_read_unless_rewriting_is_off() -> None:
    RewritePatternManager.instance().add("mine", noted)
    for rewrite, applied in [
        (None, True),
        (True, True),
        (["mine"], True),
        (["identity"], False),
        (False, False),
    ]:
        seen.clear()
        run(rewrite)
        assert ("rule" in seen) == applied, rewrite


class Counts(PatternAnalyzer):
    def analyze(self, subgraph: list[Layer]) -> None:
        seen.append(f"{len(subgraph)} layers")

    def match(self, layer: Layer) -> bool:
        return True


def test_the_shared_analyses_see_each_network() -> None:
    AnalysisPatternManager.instance().add("counts", Counts("counts"))
    run(None)
    assert any(text.endswith("layers") for text in seen)
    seen.clear()
    run(False)
    assert not seen


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("atention", "did you mean 'attention'"),
        (["identity", "layernorm"], "did you mean 'layer_norm'"),
        ("xyzzy", "the patterns are attention, "),
        ([3], "takes names, patterns and managers, not 3"),
        ([noted, noted], "two patterns are chosen under the label 'noted'"),
    ],
)
def test_a_wish_that_means_nothing_is_an_error(wish: object, said: str) -> None:
    with pytest.raises(RewriteError, match=said):
        intarsia.compile(MODEL, (X,), engines=["onnxruntime"], rewrite=wish)


def test_what_no_engine_knows_is_an_error_and_what_one_knows_goes_there() -> None:
    with pytest.raises(RewriteError, match="openvino does not know the layers that pattern 'silu' makes"):
        patterns_by_engine("silu", [OpenVINO()])
    found = patterns_by_engine(["silu", "identity"], [OpenVINO(), OnnxRuntime()])
    assert found == {"openvino": ["identity"], "onnxruntime": ["silu", "identity"]}

"""Models outside the zoo, compiled with default options: none raises, none answers otherwise."""

from __future__ import annotations

import importlib.util

import pytest
from tests.models.outcome import EQUAL, GOOD, PARTS, Outcome, page
from tests.models.outside import all_cases, run_one

pytest.importorskip("transformers", reason="most of the models come from Hugging Face configurations")
pytest.importorskip("onnxruntime", reason="an engine under test")
pytest.importorskip("openvino", reason="an engine under test")

pytestmark = pytest.mark.slow

QUICK = {
    "ElectraModel": EQUAL,
    "nn.TransformerEncoder with a padding mask": EQUAL,
    "nn.Transformer with causal and padding masks": PARTS,
    "shufflenet_v2_x0_5": EQUAL,
    "edgenext_xx_small": EQUAL,
}
_EXTRA = {"shufflenet_v2_x0_5": "torchvision", "edgenext_xx_small": "timm"}


@pytest.mark.parametrize("name", QUICK)
def test_a_handful(name: str) -> None:
    library = _EXTRA.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; it comes with the extra `models`")
    made = run_one(name)
    assert made.outcome == QUICK[name], made


@pytest.mark.full
@pytest.mark.parametrize("name", all_cases())
def test_every_model(name: str) -> None:
    made = run_one(name)
    assert made.outcome in GOOD, made


def test_time_is_limited() -> None:
    made = run_one("GRU, two directions, a state given", limit_s=0.0)
    assert made.outcome == "TIMED OUT"


def test_the_page_has_counts_and_a_line_a_model() -> None:
    text = page(
        [Outcome("a", "here", EQUAL, 0.5, 1e-7, "x | y", commit="abc123"), Outcome("b", "here", PARTS)], 3
    )
    assert "2 models: 1 equal, 1 in parts. 1 more are listed and not tried yet." in text
    assert "run at: 1 of abc123, 1 of an earlier one." in text
    assert "| a | here | equal | 50% | 1e-07 | x \\| y |" in text

"""The page of what is converted tells how much was tried, at which commit, and with what result."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.convert.coverage import ALL, page
from tests.convert.harness import REFUSED, RUNS, WRONG
from tests.convert.measure import Tally, load, save

WHOLE = Tally(Counter({RUNS: 7, REFUSED: 1}), limit=ALL, commit="abc1234")
FEW = Tally(Counter({RUNS: 3, WRONG: 1}), wrong=["relu is wrong"], limit=4, commit="def5678")
TALLIES = {("nn.functional.relu", "float32", "onnxruntime"): WHOLE, ("abs", "float16", "openvino"): FEW}


def test_the_page_says_how_much_was_tried() -> None:
    text = "\n".join(page(TALLIES, {("abs", "int64", "openvino"): WHOLE}))
    assert "Of float32 all samples that OpInfo has are taken." in text
    assert "Of float16 at most 4 samples of every operator are taken" in text
    assert "float32 at commit abc1234; float16 at commit def5678" in text
    assert "Wrong answers: 1.\n- relu is wrong" in text
    assert "| int64 | OpenVINO | all | 8 | 7 | 1 | 0 |" in text


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    save(TALLIES, tmp_path / "kept.json")
    assert load(tmp_path / "kept.json") == TALLIES

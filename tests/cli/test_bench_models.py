"""`python -m bench.models`: models that build, a run that goes on where it was, a chart and a summary."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import typer
from bench import models, peers, specimens
from bench.models import chart, fill_documents, filled
from typer.testing import CliRunner

from intarsia.cli import zoo
from intarsia.errors import IntarsiaError

APP = typer.Typer()
APP.command()(models.bench)


def test_there_are_twenty_models_and_more() -> None:
    assert len(specimens.names()) >= 20
    assert len(set(specimens.names())) == len(specimens.names())


@pytest.mark.parametrize("name", [name for name in specimens.names() if name not in zoo.names()])
def test_small_models_run(name: str) -> None:
    thing = specimens.specimen(name, full=False)
    with torch.no_grad():
        thing.model(*thing.args, **thing.kwargs)


def _result(name: str, **times: float) -> dict[str, object]:
    peers = {peer.replace("_", " "): {"median_ms": ms, "compile_s": 1.0} for peer, ms in times.items()}
    return {"name": name, "peers": peers, "complete": True}


def test_ratio_and_summary() -> None:
    results = [
        _result("a", eager=4.0, intarsia=1.0),
        _result("b", eager=1.0, intarsia=1.0),
        {"name": "c", "peers": {"eager": {"failed": "no"}}},
    ]
    assert [models.ratio(result) for result in results] == [4.0, 1.0, None]
    assert (
        models.summary(results) == "2 models: best peer / ours 2.000 in the geometric mean, 1.00 at worst (b)"
    )
    assert models.summary([]) == "nothing was measured"


def test_chart_is_svg() -> None:
    made = chart([_result("a<b", eager=4.0, intarsia=1.0), {"name": "c", "peers": {}}])
    root = ElementTree.fromstring(made)
    assert root.tag.endswith("svg") and "a&lt;b" in made and made.count("4x") and "intarsia" in made


def test_a_model_that_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "command", lambda *_: pytest.fail("it was run"))
    (tmp_path / "bert.json").write_text(json.dumps(_result("bert", eager=2.0, intarsia=1.0)))
    done = CliRunner().invoke(APP, ["bert", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "2.000 in the geometric mean" in done.output
    assert json.loads((tmp_path / "results.json").read_text())[0]["name"] == "bert"
    assert (tmp_path / "chart.svg").exists()


def test_a_limit_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "bert.json"
    path.write_text(json.dumps({**_result("bert", eager=2.0), "complete": False}))
    wish = peers.Wish("bert", full=False)
    assert models._run(wish, path, limit=0.01) == "stopped after 0.01 s"
    kept = json.loads(path.read_text())
    assert kept["stopped"] and kept["peers"]["eager"]["median_ms"] == 2.0


@pytest.mark.slow
def test_one_model_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "lstm.json"
    monkeypatch.setenv("INTARSIA_MEASURE", "1")
    wish = peers.Wish("lstm", full=False, rounds=3, budget_s=0.2, race_s=0.5, inductor=False, tolerance=0.05)
    peers.measure(wish, out)
    found = json.loads(out.read_text())
    assert found["complete"]
    exact = [name for name in peers.OWN if name != peers.TOLERANT]
    for name in ("eager", *exact, *peers.PEERS[1:3]):
        assert found["peers"][name]["median_ms"] > 0 and found["peers"][name]["error"] < 1e-3, name
    assert found["peers"][peers.TOLERANT]["error"] <= 0.05
    assert found["plan_searched"]["measured"]["chosen"] and found["compile_again_s"] > 0
    assert "measured" not in found["plan"]  # too small to be measured by default


_MARKS = "before\n<!-- {0}: begin -->\nbygone\n<!-- {0}: end -->\nafter\n"


def _documents(folder: Path) -> Path:
    (folder / "measurements.md").write_text(_MARKS.format("bench"))
    (folder / "choosing.md").write_text(_MARKS.format("mix"))
    return folder


def test_documents_are_filled_from_results(tmp_path: Path) -> None:
    trials = [
        {"name": "openvino", "blocks": [], "final": True, "seconds": [3.0, 3.0, 3.0]},
        {
            "name": "mix of blocks: a",
            "blocks": ["onnxruntime", "openvino"],
            "final": True,
            "seconds": [2.0] * 3,
        },
    ]
    plan = {"text": "Plan by measurement", "measured": {"chosen": "mix of blocks: a", "trials": trials}}
    result = {**_result("bert", eager=4.0, intarsia=1.0), "plan": plan, "compile_again_s": 1.5}
    fill_documents(_documents(tmp_path), [result], "1 model: it went well")
    measured = (tmp_path / "measurements.md").read_text()
    assert "| bert | 4.0 | 1.0 | - | -, 1.0, 1.5 |" in measured and "1 model: it went well." in measured
    assert "bygone" not in measured and measured.startswith("before") and measured.endswith("after\n")
    chosen = (tmp_path / "choosing.md").read_text()
    assert "`bert`: 1.50 times as fast" in chosen and "Plan by measurement" in chosen
    assert (tmp_path / "pictures" / "bench.svg").exists()
    again = (tmp_path / "measurements.md").read_text()
    fill_documents(tmp_path, [result], "1 model: it went well")
    assert (tmp_path / "measurements.md").read_text() == again


def test_documents_without_marks_are_left_alone(tmp_path: Path) -> None:
    _documents(tmp_path)
    (tmp_path / "choosing.md").write_text("nothing here")
    with pytest.raises(IntarsiaError, match=r"choosing.md needs the marks <!-- mix: begin -->"):
        fill_documents(tmp_path, [_result("bert", eager=4.0, intarsia=1.0)], "")
    assert (tmp_path / "choosing.md").read_text() == "nothing here"


def test_the_repository_s_documents_have_their_marks() -> None:
    docs = Path(__file__).parents[2] / "docs"
    filled((docs / "measurements.md").read_text(), "bench", "")
    filled((docs / "choosing.md").read_text(), "mix", "")


def test_an_unknown_model_is_one_sentence() -> None:
    done = CliRunner().invoke(APP, ["nonsense"])
    assert done.exit_code == 1 and "there is no model 'nonsense'" in str(done.exception)

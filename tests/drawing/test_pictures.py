"""Pages, SVG and Model Explorer's JSON of plans, without a browser."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
import torch
from tests.drawing.drawings import HOSTILE, large, two_engines
from torch import nn

import intarsia
from intarsia.drawing import model_explorer, page, svg
from intarsia.network import functional as F
from intarsia.rewrite import rule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.first(x).split(32, -1)
        return self.second(torch.special.bessel_j0(torch.cat([first, first], -1))).relu()


X = torch.rand(4, 64)


@rule(lambda op, x: op.Relu(x))
def leaky(net, x):
    return F.leaky_relu(x, 0.0)


def _content(html: str) -> dict[str, object]:
    text = re.search(r'id="content">(.*?)</script>', html)
    assert text is not None
    return json.loads(text[1])  # type: ignore[no-any-return]


def test_a_page_needs_nothing_else_and_holds_no_markup_of_the_model() -> None:
    html = page(two_engines())
    assert HOSTILE not in html and "<img" not in html and "<b>" not in html
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []
    assert _content(html)["heading"] == f"Plan {HOSTILE}"


def test_svg_is_well_formed_and_names_segments() -> None:
    picture = ElementTree.fromstring(svg(two_engines()))
    texts = ["".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == f"Plan {HOSTILE}"
    assert any("1  pytorch" in text and "2 ms" in text for text in texts)
    assert "2.0 KiB" in texts


def test_model_explorer_has_modules_as_layers() -> None:
    model_graph, body = json.loads(model_explorer(two_engines()))["graphs"]
    relu = model_graph["nodes"][1]
    assert relu["namespace"] == "encoder/layer/0"
    assert relu["incomingEdges"][0]["sourceNodeId"] == "0"
    attributes = {pair["key"]: pair["value"] for pair in model_graph["nodes"][2]["attrs"]}
    assert attributes["engine"] == "pytorch" and attributes["not on openvino"] == HOSTILE
    assert body["id"] == "intarsia/cond.true"
    assert len(json.loads(model_explorer(large()))["graphs"][0]["nodes"]) == 5001


def test_a_compiled_plan_draws_layers_before_and_after_rewriting() -> None:
    pytest.importorskip("onnxruntime")
    fast = intarsia.compile(Net(), (X,), engines="onnxruntime", min_block_size=1, rewrite=[leaky])
    drawing = fast.plan.drawing()
    assert drawing.heading.startswith("Plan by dependency: 3 segments")
    assert [segment.engine for segment in drawing.segments] == ["onnxruntime", "pytorch", "onnxruntime"]
    layers = drawing.segments[2].layers
    assert layers is not None and " Relu(" in layers.converted and " LeakyRelu(" in layers.rewritten
    assert len(layers.rewrites) == 1 and layers.rewrites[0].startswith("leaky: relu")
    assert drawing.segments[1].layers is None
    assert any("3 segments would become 1" in line for line in drawing.advice)
    names = [node.name for node in drawing.nodes]
    concatenated = next(node for node in drawing.nodes if node.op == "aten.cat.default")
    assert [names[place] for place in concatenated.inputs] == ["split"]  # through `getitem`
    bessel = next(node for node in drawing.nodes if "bessel" in node.op)
    assert (
        bessel.engine == "pytorch" and bessel.reasons["onnxruntime"] and "test_pictures.py" in bessel.source
    )
    assert _content(fast.plan.to_html())["heading"] == drawing.heading
    assert fast.plan._repr_html_().startswith("<iframe sandbox=")


def test_a_measured_plan_draws_what_was_measured() -> None:
    pytest.importorskip("onnxruntime")
    measured = intarsia.Measured(budget_s=60, candidates=())
    fast = intarsia.compile(nn.Linear(64, 64), (X,), engines=["onnxruntime"], partition=measured)
    drawing = fast.plan.drawing()
    assert "eager" in {trial.name for trial in drawing.trials} and len(drawing.trials) > 1
    assert [trial.name for trial in drawing.trials if trial.chosen] == [fast.plan.findings.chosen]
    assert sum(drawing.engine_seconds.values()) > 0


def test_an_explanation_draws_bodies_of_control_flow() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    explanation = intarsia.explain(Branch(), (X,), engines="pytorch")
    assert sorted(explanation.drawing().bodies) == sorted(explanation.bodies)
    assert len(json.loads(explanation.to_model_explorer())["graphs"]) == 3
    assert explanation.to_svg().startswith("<svg")


def test_a_loaded_plan_is_drawn_without_layers(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    fast = intarsia.compile(Net(), (X,), engines="onnxruntime", min_block_size=1)
    intarsia.save(fast, tmp_path / "net.intarsia")
    drawing = intarsia.load(tmp_path / "net.intarsia").plan.drawing()
    assert len(drawing.segments) == 3 and all(segment.layers is None for segment in drawing.segments)


def test_a_profile_gives_the_times_of_segments() -> None:
    pytest.importorskip("onnxruntime")
    fast = intarsia.compile(Net(), (X,), engines="onnxruntime", min_block_size=1)
    with intarsia.profile(fast) as profile:
        for _ in range(3):
            fast(X)
    drawing = fast.plan.drawing(profile)
    assert all(segment.seconds for segment in drawing.segments)
    assert set(drawing.engine_seconds) == {"onnxruntime", "pytorch"} and "3 calls" in drawing.timed_how
    assert _content(fast.plan.to_html(profile))["timed_how"] == drawing.timed_how

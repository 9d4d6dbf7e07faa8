"""Blocks: where a graph is cut, which blocks are equal, what they take, and the mixes that follow."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import intarsia
from intarsia.choose import mixes, search
from intarsia.choose.blocks import Blocks, blocks_at, find_blocks
from intarsia.choose.findings import BlockCost
from intarsia.choose.mixes import calibrated, path_cost, promising_mixes
from intarsia.choose.search import Search
from intarsia.convert import registry
from intarsia.lower.model import lower_model


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A stem, equal layers, and a head; a product is never parted from the activation behind it."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.linspace(-1, 1, 256 * 16).reshape(256, 16)


def _graph(model: nn.Module) -> fx.GraphModule:
    lowered, _ = lower_model(
        model.eval(), (X,), {}, None, has_converter=registry.__contains__, drop_guards=False
    )
    return lowered.module


def _blocks(most: int = 6) -> Blocks:
    blocks = find_blocks(_graph(Net()), (), most)
    assert blocks is not None
    return blocks


def test_layers_become_blocks_and_equal_ones_are_known() -> None:
    blocks = _blocks()
    starts = [blocks.begins_at(number) for number in range(len(blocks))]
    assert starts == ["stem", *(f"layers.{i}.norm" for i in range(1, 6))]
    assert len(set(blocks.digests[1:-1])) == 1
    assert len(set(blocks.digests)) == 3  # the first has the stem, the last the head
    assert 0.4 < blocks.share < 0.6


def test_blocks_in_a_row_are_the_model() -> None:
    blocks = _blocks()
    fed = blocks.values([X])
    last = blocks.pieces[-1].module(*fed[-1])
    torch.testing.assert_close(last[0], blocks.module(X)[0])
    homes = blocks.homes([str(number) for number in range(len(blocks))])
    assert list(homes) == [node for node in blocks.plan.nodes if node not in blocks.line.recomputed]


def test_known_places_give_the_same_blocks() -> None:
    blocks = _blocks()
    assert blocks_at(blocks.module, blocks.places).digests == blocks.digests


def test_what_is_atomic_is_not_cut_apart() -> None:
    gm = _graph(Net())
    bound = find_blocks(gm, (_residuals,), 6)
    starts = [] if bound is None else [bound.begins_at(number) for number in range(1, len(bound))]
    assert not any(start.endswith("norm") for start in starts)


def _residuals(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Every residual sum with the norm that follows it."""
    norms = [node for node in gm.graph.nodes if node.target is torch.ops.aten.layer_norm.default]
    return [[node.args[0], node] for node in norms if node.args[0].target is torch.ops.aten.add.Tensor]


def test_one_layer_has_nothing_to_mix() -> None:
    assert find_blocks(_graph(nn.Sequential(nn.Linear(16, 4))), (), 12) is None


ENGINES = ("a", "b", "pytorch")
seconds = st.integers(1, 50).map(float)


@st.composite
def measurements(draw: st.DrawFn) -> tuple[list[BlockCost], dict[str, float], dict[str, float]]:
    count = draw(st.integers(1, 5))
    blocks = [BlockCost(i, 1, "", "", {e: draw(seconds) for e in ENGINES}) for i in range(count)]
    alone = {e: draw(seconds) for e in draw(st.sets(st.sampled_from(ENGINES)))}
    return blocks, {e: draw(st.integers(0, 3).map(float)) for e in ENGINES}, alone


@given(measurements(), seconds)
def test_mixes_against_brute_force(
    found: tuple[list[BlockCost], dict[str, float], dict[str, float]], best: float
) -> None:
    blocks, entering, alone = found
    costs = calibrated(blocks, entering, alone)
    every = [
        (path_cost(costs, entering, way), way)
        for way in itertools.product(ENGINES, repeat=len(blocks))
        if len(set(way)) > 1
    ]
    mixes = promising_mixes(blocks, entering, alone, best, 1)
    good = [cost for cost, _ in every if cost < 0.99 * best]
    assert bool(mixes) == bool(good)
    if mixes:
        assert path_cost(costs, entering, mixes[0]) == pytest.approx(min(good))
    assert promising_mixes(blocks, entering, alone, best, 1) == mixes


@given(measurements())
def test_an_engine_alone_costs_what_it_was_measured_to(
    found: tuple[list[BlockCost], dict[str, float], dict[str, float]],
) -> None:
    blocks, entering, alone = found
    costs = calibrated(blocks, entering, alone)
    for engine, whole in alone.items():
        if any(block.seconds[engine] > entering[engine] for block in blocks):
            told = path_cost(costs, entering, [engine] * len(blocks))
            assert told == pytest.approx(max(whole, entering[engine]))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """Blocks of which engines change from one to the next, and a mix that keeps its promise.

    Engines and programs are real; only the clock is replaced.
    """
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    counts = {"blocks": 0, "races": 0}

    def block_race(runs: dict[str, object], *_: object, **__: object) -> dict[str, tuple[float, ...]]:
        counts["blocks"] += 1
        own = {"openvino": 1.0, "onnxruntime": 4.0} if counts["blocks"] == 1 else {"onnxruntime": 1.0}
        for run in runs.values():
            run()  # type: ignore[operator]
        return {name: (own.get(name, 5.0),) for name in runs}

    def race(calls: dict[str, object], *_: object, **__: object) -> dict[str, tuple[float, ...]]:
        counts["races"] += 1
        return {name: (1.0 if name.startswith("mix") else 10.0,) * 4 for name in calls}

    monkeypatch.setattr(mixes, "race_plans", block_race)
    monkeypatch.setattr("intarsia.choose.race.race_plans", race)
    return counts


@pytest.mark.openvino
def test_a_mix_that_wins_is_returned_and_remembered(table: dict[str, int]) -> None:
    model = Net().eval()
    measured = intarsia.Measured(budget_s=200, candidates=())

    def compiled() -> intarsia.Compiled:
        return intarsia.compile(
            model, (X,), engines=["openvino", "onnxruntime"], partition=measured, min_block_size=1
        )

    fast = compiled()
    found = fast.plan.findings
    assert found.trial(found.chosen).blocks[:2] == ("openvino", "onnxruntime")
    assert fast.plan.engines == ("openvino", "onnxruntime")
    assert table["blocks"] == len({block.contents for block in found.blocks}) < len(found.blocks)
    assert set(found.entering) == {"openvino", "onnxruntime", "pytorch"}
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-4)
    assert "price of a crossing" in str(fast.plan) and "not on" not in str(fast.plan)
    counts = dict(table)
    again = compiled()
    assert table == counts and again.plan.findings.remembered
    assert [len(s) for s in again.plan.segments] == [len(s) for s in fast.plan.segments]
    torch.testing.assert_close(again(X), model(X), rtol=1e-4, atol=1e-4)
    # Another depth of the same layers: its blocks are known, and only whole plans are measured.
    deeper = Net(layers=7).eval()
    intarsia.compile(deeper, (X,), engines=["openvino", "onnxruntime"], partition=measured, min_block_size=1)
    assert table["blocks"] == counts["blocks"] and table["races"] > counts["races"]


@pytest.mark.openvino
@pytest.mark.usefixtures("no_hurry")
@pytest.mark.parametrize("budget_s", [None, 200])
def test_without_a_budget_equal_layers_are_measured_only_on_engines_near_the_best(
    table: dict[str, int], monkeypatch: pytest.MonkeyPatch, budget_s: float | None
) -> None:
    def race(calls: dict[str, object], *_: object, **__: object) -> dict[str, tuple[float, ...]]:
        return {name: (1.0 if name.startswith("openvino") else 1.4,) * 4 for name in calls}

    monkeypatch.setattr("intarsia.choose.race.race_plans", race)
    monkeypatch.setattr(search, "_BLOCKS", (6,))
    # On a busy machine, what is left of a short compile is too little for blocks.
    monkeypatch.setattr(search, "_RACE_S", 0.0)
    monkeypatch.setattr(Search, "_enough", lambda *_: False)
    engines, measured = ["openvino", "onnxruntime"], intarsia.Measured(budget_s=budget_s, candidates=())
    fast = intarsia.compile(Net().eval(), (X,), engines=engines, partition=measured, min_block_size=1)
    found = fast.plan.findings
    left_out = any(reason.startswith("mixes: one engine leads") for reason in found.left_out)
    assert left_out is (budget_s is None) and bool(table["blocks"]) is not left_out

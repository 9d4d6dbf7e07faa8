"""Bisection finds offenders in few builds; repair moves only them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.graphs import Lgamma, equal, lower, refuse, run_pieces
from torch import nn

from intarsia.build.details import advise
from intarsia.build.repair import MOST_BUILT, bisect_failure, repair
from intarsia.graph.nodes import compute_nodes
from intarsia.partition import PartitionOptions, SupportTable, dependency, extract

ONE = PartitionOptions(min_block_size=1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.sets(st.integers(0, 199), max_size=5))
def test_offenders_cost_log_n_builds_each(size: int, wanted: set[int]) -> None:
    offenders = sorted(number for number in wanted if number < size)
    builds = 0

    def fails(some: list[int]) -> str | None:
        nonlocal builds
        builds += 1
        assert some == list(range(some[0], some[-1] + 1))
        bad = [number for number in some if number in wanted]
        return f"{bad[0]} is bad" if bad else None

    blamed = bisect_failure(list(range(size)), fails)
    assert blamed == {number: f"{number} is bad" for number in offenders}
    growing = math.ceil(math.log(max(2, size / 8), 4)) + 1  # runs that pass on the way to the next one
    assert builds <= 1 + len(offenders) * (math.ceil(math.log2(max(2, size))) + 1 + growing)


def test_a_run_that_fails_everywhere_leaves_after_a_while() -> None:
    """Activations that grow from block to block trip a guard of each: a build each would take minutes."""
    built: list[int] = []

    def fails(some: list[int]) -> str | None:
        built.append(len(some))
        return "too large" if any(number % 5 == 0 and number > 300 for number in some) else None

    blamed = bisect_failure(list(range(1000)), fails)
    assert min(blamed) == 305 and {number for number in range(301, 1000) if number % 5 == 0} <= set(blamed)
    assert sum(built) < MOST_BUILT + 12 * 1000


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 120), st.sets(st.integers(0, 119), max_size=7), st.integers(2, 9))
def test_offenders_that_are_alike_are_the_same_ones(size: int, wanted: set[int], period: int) -> None:
    offenders = {number for number in wanted if number < size}

    def fails(some: list[int]) -> str | None:
        assert some == list(range(some[0], some[-1] + 1))
        bad = offenders.intersection(some)
        return f"{min(bad)} is bad" if bad else None

    nodes = list(range(size))
    blamed = bisect_failure(nodes, fails, alike=lambda node: nodes[node % period :: period])
    assert blamed.keys() == offenders


def test_the_attention_of_every_layer_costs_a_build_each() -> None:
    built: list[int] = []
    offenders = set(range(20, 240, 20))  # one in each of eleven layers

    def fails(some: list[int]) -> str | None:
        built.append(len(some))
        return "bad" if offenders & set(some) else None

    nodes = list(range(240))
    assert set(bisect_failure(nodes, fails, alike=lambda node: nodes[node % 20 :: 20])) == offenders
    assert len(built) < 9 + 2 * 12 + 3, "one search, then each layer's node and what lies between"


def test_offenders_near_each_other_are_found_by_short_runs() -> None:
    built: list[int] = []
    offenders = {500, 503, 506, 509, 512, 900}

    def fails(some: list[int]) -> str | None:
        built.append(len(some))
        return "bad" if offenders & set(some) else None

    assert set(bisect_failure(list(range(1000)), fails)) == offenders
    after = built[built.index(501) + 1 :]
    assert max(after[:16]) <= 8


def test_offenders_close_behind_each_other_end_the_search() -> None:
    """Where every block fails, each of them costs builds, and little is left that could run."""
    builds = 0

    def fails(some: list[int]) -> str | None:
        nonlocal builds
        builds += 1
        return "too large" if any(number % 3 == 0 and number >= 300 for number in some) else None

    blamed = bisect_failure(list(range(600)), fails)
    assert sorted(blamed)[:3] == [300, 303, 306] and set(range(330, 600)) <= set(blamed)
    assert builds < 60


def test_nodes_that_fail_only_together_lose_the_later_one() -> None:
    assert bisect_failure([0, 1, 2, 3, 4], lambda some: "both" if {1, 3} <= set(some) else None) == {
        3: "both"
    }


def chain() -> nn.Module:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.exp(torch.cos(torch.sin(x)))).relu() + x

    return Chain()


def test_repair_moves_only_the_offender() -> None:
    gm = lower(chain(), (torch.rand(3),))
    table = SupportTable(("a", "pytorch"))
    plan = dependency(gm, table, ONE)
    assert len(plan) == 1
    exp = next(node for node in compute_nodes(gm.graph) if "exp" in node.name)
    repaired, after = repair(gm, plan, table, {exp: {"a": "it crashed"}}, ONE)
    repaired.verify(gm)
    assert [(s.engine, [n.name for n in s.nodes]) for s in repaired.segments] == [
        ("a", ["sin", "cos"]),
        ("pytorch", ["exp"]),
        ("a", ["tanh", "relu", "add"]),
    ]
    assert repaired.segments[1].reasons[exp] == {"a": "it crashed"} == dict(after.refusals[exp])
    args = (torch.rand(3),)
    assert equal(run_pieces(gm, extract(gm, repaired), args)[0], gm(*args)[0])


def test_repair_joins_pytorch_neighbours_and_keeps_engine_segments() -> None:
    gm = lower(chain(), (torch.rand(3),))
    table = refuse(gm, "cos")
    plan = dependency(gm, table, ONE)
    assert [s.engine for s in plan.segments] == ["a", "pytorch", "a"]
    exp = next(node for node in compute_nodes(gm.graph) if "exp" in node.name)
    repaired, _ = repair(gm, plan, table, {exp: {"a": "it crashed"}}, ONE)
    repaired.verify(gm)
    assert [len(s) for s in repaired.segments] == [1, 2, 3]
    assert repaired.segments[0].nodes == plan.segments[0].nodes


def test_repair_sends_a_rest_that_is_too_small_along() -> None:
    gm = lower(chain(), (torch.rand(3),))
    options = PartitionOptions(min_block_size=3)
    table = SupportTable(("a", "pytorch"))
    exp = next(node for node in compute_nodes(gm.graph) if "exp" in node.name)
    repaired, _ = repair(gm, dependency(gm, table, options), table, {exp: {"a": "it crashed"}}, options)
    repaired.verify(gm)
    assert [s.engine for s in repaired.segments] == ["pytorch", "a"]
    assert repaired.segments[0].reasons[repaired.segments[0].nodes[0]] == {
        "a": "its segment has 2 ops, and min_block_size=3"
    }


def test_a_refused_shared_view_asks_for_a_new_plan() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x.view(-1))

    gm = lower(Views(), (torch.rand(3, 2),))
    table = SupportTable(("a", "pytorch"))
    view = next(node for node in compute_nodes(gm.graph) if "view" in node.name)
    assert repair(gm, dependency(gm, table, ONE), table, {view: {"a": "no"}}, ONE) is None


def test_advice_names_the_op_that_splits_the_graph() -> None:
    gm = lower(Lgamma(), (torch.rand(3, 4), torch.rand(3, 4)))
    advice = advise(gm, refuse(gm, "lgamma"), dependency, ONE)
    assert str(advice[0]) == "if a took aten.lgamma.default (3 nodes), 3 segments would become 1"
    assert not advise(gm, refuse(gm), dependency, ONE)


@pytest.mark.parametrize("full", [True])
def test_no_advice_where_nothing_may_be_left(full: bool) -> None:
    gm = lower(Lgamma(), (torch.rand(3, 4), torch.rand(3, 4)))
    options = PartitionOptions(require_full_compilation=full)
    assert advise(gm, SupportTable(("a", "pytorch")), dependency, options) == []

"""`explain` says before a compile what `compile` then does."""

from __future__ import annotations

import pytest

import intarsia
from intarsia.cli import zoo
from intarsia.graph.plan import Plan


def _placement(plan: Plan) -> list[tuple[str, list[str]]]:
    return [(segment.engine, [node.name for node in segment.nodes]) for segment in plan.segments]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_explain_and_compile_agree(name: str) -> None:
    specimen = zoo.specimen(name)
    compiled = intarsia.compile(specimen.model, specimen.args, specimen.kwargs)
    assert isinstance(compiled, intarsia.Compiled)
    explained = intarsia.explain(specimen.model, specimen.args, specimen.kwargs)
    assert _placement(explained.plan) == _placement(compiled.plan)

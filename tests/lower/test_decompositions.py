"""The decomposition table: ours over torch's, converters over both, two disjoint sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import intarsia
from intarsia.errors import LoweringError
from intarsia.lower import lower
from intarsia.lower.decompositions import (
    composite_names,
    decomposition_table,
    overloads_of,
    register_decomposition,
    torch_disabled_decompositions,
    torch_enabled_decompositions,
    unregister_decomposition,
)
from intarsia.lower.lowering import decomposed

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    yield
    torch_enabled_decompositions.clear()
    torch_disabled_decompositions.clear()


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, x, alpha=2) + torch.nn.functional.gelu(x)


def targets(has_converter: Any = lambda target: False) -> list[str]:
    program = export(Model(), (torch.randn(3, 3),), strict=False)
    graph = decomposed(program, decomposition_table(has_converter)).graph
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_torchs_defaults_are_the_start() -> None:
    table = decomposition_table()
    defaults = torch.export.default_decompositions()
    left = {**defaults}.keys() - table.keys()
    assert len(table) > 500 and aten.special_expit.default in table
    assert aten.linalg_inv.default in left and len(left) < 10


def test_torchs_table_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it takes a tenth of a second, most of what a tiny model's lowering takes."""
    first = decomposition_table()
    first.clear()  # the caller's own
    monkeypatch.setattr(torch.export, "default_decompositions", lambda: pytest.fail("read again"))
    assert len(decomposition_table()) > 500


def test_a_composite_operator_registered_later_is_in_the_table() -> None:
    before = composite_names()
    assert before is not None and "aten::special_expit" in before, "this torch does not tell them"
    decomposition_table()
    library = torch.library.Library("late_for_a_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    twice = torch.ops.late_for_a_test.twice.default
    assert twice in decomposition_table()
    library._destroy()
    assert twice not in decomposition_table()


def test_an_operator_with_a_converter_stays_whole() -> None:
    expit = aten.special_expit.default
    assert expit not in decomposition_table(lambda target: target is expit)
    assert decomposition_table(lambda target: True) == {}


@pytest.mark.parametrize(
    "operator",
    [
        aten.linear.default,
        aten.matmul.default,
        aten.layer_norm.default,
        aten.conv2d.default,
        aten.silu.default,
    ],
)
def test_enabling_what_torch_composes_itself_ends(operator: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.layer_norm(torch.nn.functional.linear(x, x), (2,))
            y = torch.nn.functional.silu(torch.matmul(y, x))
            return torch.nn.functional.conv2d(y.reshape(1, 1, 2, 3), torch.ones(1, 1, 2, 2))

    x = torch.rand(2, 3)
    program = torch.export.export(Model(), (x,))
    torch_enabled_decompositions.add(operator)
    try:
        lowered = lower(program, lambda target: True)
    finally:
        torch_enabled_decompositions.discard(operator)
    assert operator not in [node.target for node in lowered.module.graph.nodes]
    torch.testing.assert_close(lowered.module(x)[0], Model()(x))


def test_the_users_decomposition_wins_over_torchs_and_over_converters() -> None:
    @register_decomposition(aten.addmm.default)
    def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        return torch.add(torch.mul(self, beta), torch.mul(torch.matmul(mat1, mat2), alpha))

    try:
        assert decomposition_table()[aten.addmm.default] is addmm
        assert "aten.addmm.default" not in targets()
        assert "aten.addmm.default" not in targets(lambda target: target is aten.addmm.default)
        assert decomposition_table(lambda target: True)[aten.addmm.default] is addmm
        torch_disabled_decompositions.add(aten.addmm.default)
        assert decomposition_table()[aten.addmm.default] is addmm, "only torch's own are disabled"
    finally:
        unregister_decomposition(aten.addmm.default)
    assert aten.addmm.default not in decomposition_table()


def test_enabled_is_decomposed_even_with_a_converter() -> None:
    assert "aten.gelu.default" in targets()
    torch_enabled_decompositions.add(aten.gelu.default)
    assert "aten.gelu.default" not in targets(lambda target: target is aten.gelu.default)


def test_disabled_is_left_whole() -> None:
    expit = aten.special_expit.default
    assert expit in decomposition_table()
    torch_disabled_decompositions.add(expit)
    assert expit not in decomposition_table()


def test_the_sets_are_disjoint() -> None:
    torch_enabled_decompositions.add(aten.gelu.default)
    with pytest.raises(LoweringError, match=r"gelu.default is in torch_enabled_decompositions; take it"):
        torch_disabled_decompositions.add(aten.gelu)
    with pytest.raises(LoweringError, match="take it out there"):
        torch_disabled_decompositions.update([aten.silu.default, aten.gelu.default])
    torch_enabled_decompositions.remove(aten.gelu.default)
    torch_disabled_decompositions.add(aten.gelu.default)
    with pytest.raises(LoweringError, match="is in torch_disabled_decompositions"):
        torch_enabled_decompositions.add(aten.gelu.default)


def test_in_place_set_operators_are_checked_too() -> None:
    enabled = torch_enabled_decompositions
    enabled |= {aten.gelu.default}
    assert enabled is torch_enabled_decompositions and aten.gelu.default in enabled
    disabled = torch_disabled_decompositions
    with pytest.raises(LoweringError):
        disabled |= {aten.gelu.default}
    enabled -= {aten.gelu.default}
    assert len(enabled) == 0


def test_what_torch_cannot_decompose_cannot_be_enabled() -> None:
    with pytest.raises(LoweringError, match=r"torch has no decomposition of aten.convolution.default"):
        torch_enabled_decompositions.add(aten.convolution.default)
    with pytest.raises(LoweringError, match="'gelu' is not an operator"):
        torch_enabled_decompositions.add("gelu")


def test_a_packet_stands_for_its_overloads() -> None:
    assert aten.add.Tensor in overloads_of(aten.add)
    assert aten.add.out not in overloads_of(aten.add)
    torch_disabled_decompositions.add(aten.gelu)
    assert aten.gelu.default in torch_disabled_decompositions
    assert "aten.gelu.default" in repr(torch_disabled_decompositions)


def test_a_second_decomposition_must_say_replace() -> None:
    def one(self: Any) -> Any:
        return self

    def two(self: Any) -> Any:
        return self

    register_decomposition(aten.sinc.default)(one)
    try:
        with pytest.raises(LoweringError, match="decomposed by one already; pass replace=True"):
            register_decomposition(aten.sinc.default)(two)
        register_decomposition(aten.sinc.default, replace=True)(two)
        assert decomposition_table()[aten.sinc.default] is two
    finally:
        unregister_decomposition(aten.sinc.default)
    with pytest.raises(LoweringError, match="it cannot be removed"):
        unregister_decomposition(aten.sinc.default)
    with pytest.raises(LoweringError, match="needs the operator"):
        register_decomposition()


def test_a_decomposition_may_decline() -> None:
    @register_decomposition(aten.gelu.default)
    def gelu(self: Any, *, approximate: str = "none") -> Any:
        return NotImplemented if approximate == "none" else self

    try:
        assert "aten.gelu.default" in targets()
    finally:
        unregister_decomposition(aten.gelu.default)


@pytest.mark.parametrize("varies", [False, True])
def test_a_graph_that_cannot_be_taken_apart_runs_in_pytorch(varies: bool) -> None:
    """Whatever is raised while torch decomposes a model, the model runs, and a note says why."""

    class Curve(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(x) + 1

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("expected compiled_fn to be GraphModule")

    model, x = Curve(), torch.randn(3, 4)
    register_decomposition(torch.ops.aten.i0.default)(fails)
    try:
        fast = intarsia.compile(
            model,
            (x,),
            dynamic_shapes=({0: torch.export.Dim("n", min=1, max=8)},) if varies else None,
            engines=["onnxruntime"],
        )
    finally:
        unregister_decomposition(torch.ops.aten.i0.default)
    assert any("cannot be lowered: AssertionError: expected compiled_fn" in note for note in fast.notes)
    torch.testing.assert_close(fast(x), model(x))

"""Which converter is asked first, which refuse and why, and that nothing leaks."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.convert.programs import program_of
from torch import fx

from intarsia.convert import ConverterPriority, convert, converter, registry
from intarsia.convert.interpreter import NodeError
from intarsia.convert.registry import Registry, key_of
from intarsia.engines import OnnxRuntime, OpenVINO, PyTorch
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F
from intarsia.partition.support import support_table

aten = torch.ops.aten
X = torch.randn(3, 4)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    with registry.override():
        yield


def layers(function: Any, *inputs: torch.Tensor) -> list[str]:
    return [layer.kind for layer in convert(program_of(function, *(inputs or (X,)))).get_layers()]


def test_users_come_before_ours_and_high_before_standard() -> None:
    asked: list[str] = []

    def tries(name: str, **options: Any) -> None:
        def function(ctx: Any, self: Tensor) -> Tensor:
            asked.append(name)
            raise ConversionError(f"{name} does not want it")

        function.__name__ = name
        converter(aten.relu.default, **options)(function)

    tries("early")
    tries("high", priority=ConverterPriority.HIGH)
    tries("late")
    assert layers(torch.relu)[-1] == "Relu", "ours is the last that is asked, and takes it"
    assert asked == ["high", "late", "early"]


def test_every_refusal_is_told() -> None:
    @converter(aten.relu.default)
    def first(ctx: Any, self: Tensor) -> Tensor:
        raise ConversionError("the first is tired")

    @converter(aten.relu.default, capability_validator=lambda node: "the second is asleep")
    def second(ctx: Any, self: Tensor) -> Tensor:
        raise AssertionError("never called")

    with registry.override(without=aten.relu.default):
        registry.register(first.converters[0])  # type: ignore[attr-defined]
        registry.register(second.converters[0])  # type: ignore[attr-defined]
        with pytest.raises(NodeError, match="the second is asleep; the first is tired"):
            layers(torch.relu)


def test_the_same_function_is_not_shipped_twice() -> None:
    entry = registry.converters(aten.relu.default)[0]
    with pytest.raises(ConversionError, match="give one a higher priority"):
        registry.register(entry)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (True, None),
        (None, None),
        (False, "the validator of mine does not accept it"),
        ("dilation=(2, 2) is not handled", r"dilation=\(2, 2\) is not handled"),
    ],
)
def test_a_validator_returns_a_bool_or_a_reason(verdict: bool | str | None, reason: str | None) -> None:
    @converter(aten.relu.default, capability_validator=lambda node: verdict)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        return F.identity(F.relu(self))

    registry.unregister(aten.relu.default)
    registry.register(mine.converters[0])  # type: ignore[attr-defined]
    if reason is None:
        assert layers(torch.relu) == ["Relu", "Identity"]
        return
    with pytest.raises(NodeError, match=reason):
        layers(torch.relu)


def test_a_validator_that_breaks_costs_its_node_only() -> None:
    def broken(node: fx.Node) -> bool:
        return bool(node.args[7])

    @converter(aten.relu.default, capability_validator=broken)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        raise AssertionError("never called")

    node = next(n for n in program_of(torch.relu, X).graph.nodes if n.op == "call_function")
    assert "the validator of mine failed: IndexError" in str(mine.converters[0].refuses(node))  # type: ignore[attr-defined]
    assert layers(torch.relu) == ["Relu"], "the next converter takes the node"


def test_a_converter_that_breaks_costs_its_node_only() -> None:
    @converter(aten.relu.default)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        raise ZeroDivisionError("oh")

    assert "Relu" in layers(torch.relu)
    with (
        registry.override(mine, without=aten.relu.default),
        pytest.raises(NodeError, match="ZeroDivisionError: oh"),
    ):
        layers(torch.relu)


def test_override_is_scoped_even_when_the_body_raises() -> None:
    @converter(aten.relu.default, register=False)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        return F.identity(self)

    before = registry.converters(aten.relu.default)
    assert layers(torch.relu) == ["Relu"]
    with pytest.raises(KeyError), registry.override(mine):  # noqa: PT012
        assert layers(torch.relu) == ["Identity"]
        raise KeyError
    assert registry.converters(aten.relu.default) == before
    with (
        registry.override(without=[aten.relu.default, aten.gelu.default]),
        pytest.raises(NodeError, match="no converter"),
    ):
        layers(torch.relu)
    assert layers(torch.relu) == ["Relu"]


def test_override_takes_converters_only() -> None:
    with pytest.raises(ConversionError, match="decorate it with @converter"), registry.override(len):
        pass
    assert aten.relu.default in registry


def test_unregister_forgets_one_or_all() -> None:
    @converter(aten.relu.default)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        return F.identity(self)

    assert layers(torch.relu) == ["Identity"]
    registry.unregister(mine.converters[0])  # type: ignore[attr-defined]
    assert layers(torch.relu) == ["Relu"]
    registry.unregister(aten.relu.default)
    assert aten.relu.default not in registry
    with pytest.raises(ConversionError, match="it cannot be removed"):
        registry.unregister(aten.relu.default)


def test_disabled_is_made_but_not_registered() -> None:
    version = registry.version

    @converter(aten.relu.default, enabled=False)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        return F.identity(self)

    assert registry.version == version
    assert layers(torch.relu) == ["Relu"]


def test_every_change_raises_the_version() -> None:
    mine, versions = Registry(), [0]
    entry = registry.converters(aten.relu.default)[0]
    mine.register(entry)
    versions.append(mine.version)
    with mine.override(without=aten.relu.default):
        versions.append(mine.version)
    versions.append(mine.version)
    mine.unregister(entry)
    versions.append(mine.version)
    assert versions == sorted(set(versions))


def test_a_packet_with_one_overload_is_a_key() -> None:
    assert key_of(aten.relu) is aten.relu.default
    assert key_of(aten.silu) is aten.silu.default
    with pytest.raises(ConversionError, match=r"several overloads .*Tensor.*name the one you convert"):
        key_of(aten.add)
    with pytest.raises(ConversionError, match="is not an operator"):
        key_of("aten::add")
    with pytest.raises(ConversionError, match="needs the operator"):
        converter()


def test_a_python_operator_is_a_key() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    y = graph.call_function(operator.xor, (x, x))
    y.meta["val"] = X
    graph.output(y)
    module = fx.GraphModule({}, graph)
    with pytest.raises(NodeError, match="no converter"):
        convert(module)

    @converter(operator.xor)
    def mine(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return F.sub(a, b)

    assert [layer.kind for layer in convert(module).get_layers()] == ["Sub"]


def test_static_only_converters_say_so() -> None:
    @converter(aten.relu.default, supports_dynamic_shapes=False)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        return F.identity(self)

    registry.unregister(aten.relu.default)
    registry.register(mine.converters[0])  # type: ignore[attr-defined]
    assert layers(torch.relu) == ["Identity"]
    batch = torch.export.Dim("batch", min=2)
    with pytest.raises(NodeError, match="mine handles static shapes only"):
        convert(program_of(torch.relu, X, dynamic=({0: batch},)))


def test_registering_from_many_threads_loses_nothing() -> None:
    mine = Registry()
    entries = [
        converter(aten.relu.default, register=False)(lambda ctx, self: self).converters[0] for _ in range(64)
    ]  # type: ignore[attr-defined]
    threads = [threading.Thread(target=mine.register, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(mine.converters(aten.relu.default)) == set(entries)


@torch.library.custom_op("intarsia_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_is_named_by_the_object_that_torch_library_makes() -> None:
    @converter(twice)
    def double(ctx: Any, x: Tensor) -> Tensor:
        return F.add(x, x)

    assert key_of(twice) is torch.ops.intarsia_tests.twice.default
    assert layers(lambda x: twice(x) + 1) == ["Add", "Add"]


def test_a_custom_operator_without_an_overload_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(twice, "_opoverload", None)
    with pytest.raises(ConversionError, match="name its overload"):
        key_of(twice)


def test_a_converter_knows_the_engine_and_its_options() -> None:
    @converter(aten.relu.default, register=False)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        if ctx.engine.name == "openvino":
            raise ConversionError(f"not for {ctx.engine.name} with {ctx.settings['threads']} threads")
        return F.relu(self)

    module = program_of(torch.relu, X)
    (node,) = [n for n in module.graph.nodes if n.op == "call_function"]
    engines = [OnnxRuntime(threads=1), OpenVINO(threads=3), PyTorch()]
    with registry.override(mine, without=aten.relu.default):
        assert support_table(module, engines).refusals == {
            node: {"openvino": "not for openvino with 3 threads"}
        }
        assert [layer.kind for layer in convert(module, engine=engines[0]).get_layers()] == ["Relu"]


def test_engines_share_a_trial_conversion_that_does_not_ask_for_them() -> None:
    calls: list[str] = []

    @converter(aten.relu.default, register=False)
    def mine(ctx: Any, self: Tensor) -> Tensor:
        calls.append(ctx.name)
        return F.relu(self)

    with registry.override(mine, without=aten.relu.default):
        support_table(program_of(torch.relu, X), [OnnxRuntime(), OpenVINO(), PyTorch()])
    assert len(calls) == 1

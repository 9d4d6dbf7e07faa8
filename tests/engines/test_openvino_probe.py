"""What OpenVINO takes, asked of many networks at once: the same as asked of each."""

from __future__ import annotations

import pytest
import torch
from tests.convert.one_node import network_of

from intarsia.engines import OpenVINO
from intarsia.engines.openvino import model
from intarsia.network import Network

pytestmark = pytest.mark.openvino

X = torch.randn(2, 3, 4)


def networks() -> list[Network]:
    ops = torch.ops.aten
    calls = [(ops.relu.default, X), (ops.add.Tensor, X, X), (ops.relu.default, X[0])]
    return [network_of(op, *args) for op, *args in calls]


def test_many_are_answered_by_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    own = model._supported
    monkeypatch.setattr(model, "_supported", lambda *told: (asked.append(1), own(*told))[1])
    assert OpenVINO().probe_all(networks()) == [None, None, None]
    assert len(asked) == 1


def test_one_that_is_refused_takes_nobody_along() -> None:
    engine = OpenVINO()
    nets = [*networks(), network_of(torch.ops.aten.relu.default, X.double()), *networks()]
    said = engine.probe_all(nets)
    assert said == [engine.probe(net) for net in nets]
    assert said[3] is not None and said[:3] == said[4:] == [None] * 3


def test_what_fails_together_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model._supported

    def fails(model: object, precision: str) -> object:
        kinds = {op.get_type_name() for op in model.get_ops()}  # type: ignore[attr-defined]
        if "Add" in kinds:
            raise RuntimeError("no sums today")
        return own(model, precision)

    monkeypatch.setattr(model, "_supported", fails)
    assert OpenVINO().probe_all(networks()) == [None, "OpenVINO refuses it: no sums today", None]


def test_what_the_plugin_leaves_out_is_told_of_its_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model._supported
    monkeypatch.setattr(
        model,
        "_supported",
        lambda *told: {name: d for name, d in own(*told).items() if "add" not in name.lower()},
    )
    said = OpenVINO().probe_all(networks())
    assert said[0] is said[2] is None
    assert said[1] is not None and said[1].startswith("OpenVINO's CPU plugin does not take")

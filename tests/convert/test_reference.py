"""Every target the reference library converts is converted here, or says why not."""

from __future__ import annotations

import pytest
import torch
from tests.convert.reference import CORE_REASONS, REASONS, TARGETS, how, target_of

from intarsia.convert.evaluators import EVALUATORS
from intarsia.convert.registry import registry
from intarsia.lower.complex import COMPLEX_DECOMPOSITIONS


def test_the_list_is_whole() -> None:
    assert len(TARGETS) == 243
    assert set(REASONS) <= set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_target_is_answered(name: str) -> None:
    assert how(name) is not None, f"{name} has no converter, no evaluator and no reason"


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_is_not_kept_for_what_is_converted(name: str) -> None:
    if "tensorrt" in name:
        assert not hasattr(torch.ops.tensorrt, "quantize_op"), "the library is loaded: convert its operators"
        return
    target = target_of(name)
    assert target not in registry and target not in EVALUATORS


def core_operators() -> list[torch._ops.OpOverload]:
    """Core ATen without what is random or writes to its arguments."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in (getattr(packet, o) for o in packet.overloads()):
            random = torch.Tag.nondeterministic_seeded in overload.tags
            if torch.Tag.core in overload.tags and not random and not overload._schema.is_mutable:
                found.append(overload)
    return found


@pytest.mark.parametrize("overload", core_operators(), ids=str)
def test_core_aten_is_converted(overload: torch._ops.OpOverload) -> None:
    reason = CORE_REASONS.get(str(overload))
    spelled_out = overload in COMPLEX_DECOMPOSITIONS and overload not in registry
    assert overload in registry or overload in EVALUATORS or spelled_out or reason is not None

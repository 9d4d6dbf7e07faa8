"""What each operator makes: dtype and shape of its outputs, from its inputs and attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.schema import schema_of
from intarsia.network.types import Shape
from intarsia.network.value import TypedValue

Made = list[tuple[ir.DataType, Shape]]
Rule = Callable[[Sequence[TypedValue | None], Mapping[str, Any], int], Made]

_RULES: dict[tuple[str, str], Rule] = {}


def infers(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the shape rule of operators; an opaque layer gets one the same way."""

    def register(rule: Rule) -> Rule:
        for op_type in op_types:
            _RULES[domain, op_type] = rule
        return rule

    return register


def infer(
    domain: str,
    op_type: str,
    inputs: Sequence[TypedValue | None],
    attributes: Mapping[str, Any],
    outputs: int,
) -> Made:
    """Dtype and shape of every output."""
    rule = _RULES.get((domain, op_type))
    if rule is None:
        raise NetworkError(f"no shape rule for {domain + '::' if domain else ''}{op_type}")
    schema = schema_of(domain, op_type)
    if schema is not None and (why := schema.misfit(op_type, inputs)):
        raise NetworkError(f"a layer {why}")
    return rule(inputs, attributes, outputs)


def has_rule(domain: str, op_type: str) -> bool:
    return (domain, op_type) in _RULES


def known_ints(tensor: TypedValue | None) -> list[int] | None:
    """The content of an integer tensor, if it is constant."""
    if tensor is None:
        return None
    array = tensor.constant
    return None if array is None else [int(x) for x in np.ravel(array)]


def first(inputs: Sequence[TypedValue | None]) -> TypedValue:
    tensor = inputs[0]
    if tensor is None:
        raise NetworkError("the first input is missing")
    return tensor

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
ShapeRule = Callable[[Sequence[TypedValue | None], Mapping[str, Any], int], Made]

_RULES: dict[tuple[str, str], ShapeRule] = {}


def infers(*op_types: str, domain: str = "") -> Callable[[ShapeRule], ShapeRule]:
    """Register the shape rule of operators; an opaque layer gets one the same way."""

    def register(rule: ShapeRule) -> ShapeRule:
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


def second(inputs: Sequence[TypedValue | None]) -> TypedValue:
    tensor = inputs[1] if len(inputs) > 1 else None
    if tensor is None:
        raise NetworkError("the second input is missing")
    return tensor


def optional(inputs: Sequence[TypedValue | None], place: int) -> TypedValue | None:
    """An input that may be left out."""
    return inputs[place] if len(inputs) > place else None


def length(tensor: TypedValue, what: str) -> int:
    """How many numbers a vector of sizes or axes holds; the rank of what follows depends on it."""
    size = tensor.shape[0] if tensor.ndim == 1 else None
    if not isinstance(size, int):
        raise NetworkError(f"{what} should be a vector of known length, not {tensor!r}")
    return size

"""Shape rules of matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers
from intarsia.network.types import Dim
from intarsia.network.value import TypedValue


@infers("MatMul")
def _matmul(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    a, b = first(inputs), inputs[1]
    assert b is not None
    left, right = a.shape, b.shape
    if not left or not right:
        raise NetworkError("MatMul of a 0-d tensor")
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    inner = right[-2] if len(right) > 1 else right[0]
    if isinstance(left[-1], int) and isinstance(inner, int) and left[-1] != inner:
        raise NetworkError(f"MatMul of {left} and {right}: {left[-1]} against {inner}")
    return [(a.dtype, shapes.broadcast(left[:-2], right[:-2]) + rows + columns)]


@infers("Gemm")
def _gemm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    a, b = first(inputs), inputs[1]
    assert b is not None
    rows = a.shape[1 if attributes.get("transA") else 0]
    columns = b.shape[0 if attributes.get("transB") else 1]
    return [(a.dtype, (rows, columns))]


@infers("Einsum")
def _einsum(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    left, right = str(attributes["equation"]).replace(" ", "").split("->")
    sizes: dict[str, Dim] = {}
    for term, tensor in zip(left.split(","), inputs, strict=True):
        assert tensor is not None
        sizes.update(zip(term, tensor.shape, strict=True))
    return [(first(inputs).dtype, tuple(sizes[letter] for letter in right))]

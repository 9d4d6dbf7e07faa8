"""Shape rules of matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, optional, second
from intarsia.network.types import Dim, Shape
from intarsia.network.value import TypedValue


@infers("MatMul")
def _matmul(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    a, b = first(inputs), second(inputs)
    left, right = a.shape, b.shape
    if not left or not right:
        raise NetworkError("MatMul of a 0-d tensor")
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    inner = right[-2] if len(right) > 1 else right[0]
    shapes.same(left[-1], inner, f"MatMul of {left} and {right}")
    return [(a.dtype, shapes.broadcast(left[:-2], right[:-2]) + rows + columns)]


@infers("Gemm")
def _gemm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    a, b, c = first(inputs), second(inputs), optional(inputs, 2)
    shapes.require_rank(a, "the left side of Gemm", 2)
    shapes.require_rank(b, "the right side of Gemm", 2)
    rows, left = reversed(a.shape) if attributes.get("transA") else a.shape
    right, columns = reversed(b.shape) if attributes.get("transB") else b.shape
    shapes.same(left, right, f"Gemm of {a.shape} and {b.shape}")
    made: Shape = (rows, columns)
    if c is not None:
        shapes.require_rank(c, "the bias of Gemm", 0, 2)
        shapes.require_fits(c.shape, made, "the bias of Gemm")
    return [(a.dtype, made)]


@infers("Einsum")
def _einsum(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    equation = str(attributes["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(inputs):
        raise NetworkError(f"Einsum {equation!r} of {len(inputs)} tensors")
    sizes: dict[str, Dim] = {}
    dots: list[Shape] = []
    for term, tensor in zip(terms, inputs, strict=True):
        assert tensor is not None
        before, ellipsis, after = term.partition("...")
        between = tensor.ndim - len(before) - len(after)
        if between < 0 or (between and not ellipsis):
            raise NetworkError(f"{term!r} in Einsum {equation!r} of {tensor.ndim} dimensions")
        if ellipsis:
            dots.append(tensor.shape[len(before) : len(before) + between])
        named = tensor.shape[: len(before)] + tensor.shape[len(before) + between :]
        for letter, dim in zip(before + after, named, strict=True):
            sizes[letter] = _met(sizes[letter], dim) if letter in sizes else dim
    if len({len(each) for each in dots}) > 1:
        raise NetworkError(
            f"the dots of Einsum {equation!r} stand for {[len(each) for each in dots]} dimensions"
        )
    if not arrow:  # letters met once, in the order of the alphabet
        once = sorted(letter for letter in sizes if left.count(letter) == 1)
        right = ("..." if dots else "") + "".join(once)
    if unknown := [letter for letter in right.replace("...", "") if letter not in sizes]:
        raise NetworkError(f"Einsum {equation!r} makes {unknown[0]!r} of nothing")
    before, ellipsis, after = right.partition("...")
    spread = shapes.broadcast(*dots) if ellipsis and dots else ()
    return [(first(inputs).dtype, (*[sizes[x] for x in before], *spread, *[sizes[x] for x in after]))]


def _met(a: Dim, b: Dim) -> Dim:
    """The size of a letter met twice."""
    return shapes.broadcast((a,), (b,))[0]

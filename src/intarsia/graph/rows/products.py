"""Where the batch is in the results of products, convolutions, attention and recurrent layers."""

from __future__ import annotations

from typing import Any

import torch

from intarsia.graph.rows.call import Call, Mixes, Placement, Rows, Unknown


def aligned(call: Call, operands: list[tuple[torch.Tensor, Placement]], rank: int) -> int:
    """The axis of a result of this rank to which the batch broadcasts; Mixes if operands differ in it."""
    axes = {where.axis + rank - value.dim() for value, where in operands if isinstance(where, Rows)}
    if len(axes) != 1:
        raise Mixes(f"{call.name} combines different rows")
    (axis,) = axes
    for value, where in operands:
        own = axis - (rank - value.dim())
        if where is None and own >= 0 and value.shape[own] != 1:
            raise Mixes(f"{call.name} combines the batch with a constant of {value.shape[own]} rows")
    return axis


def pointwise(call: Call) -> Placement:
    return call.at(aligned(call, call.operands(), call.result.dim()))


def matmul(call: Call) -> Placement:
    """`a @ b`, plus an addend for `addmm` and `baddbmm`."""
    first, second = ("mat1", "mat2") if call.name == "aten::addmm" else ("self", "mat2")
    if call.name in ("aten::matmul", "aten::mv"):
        first, second = "self", "other" if call.name == "aten::matmul" else "vec"
    if call.name == "aten::baddbmm":
        first, second = "batch1", "batch2"
    axis = _product(call, (call.arg(first), call.of(first)), (call.arg(second), call.of(second)))
    if call.name in ("aten::addmm", "aten::baddbmm"):
        added = (call.arg("self"), call.of("self"))
        aligned(call, [(call.result, Rows(axis, 1)), added], call.result.dim())
    return call.at(axis)


def _product(call: Call, a: tuple[torch.Tensor, Placement], b: tuple[torch.Tensor, Placement]) -> int:
    rank: int = call.result.dim()
    (left, at_left), (right, at_right) = a, b
    columns = isinstance(at_right, Rows) and right.dim() > 1 and at_right.axis == right.dim() - 1
    lines = isinstance(at_left, Rows) and left.dim() > 1 and at_left.axis == left.dim() - 2
    if columns and at_left is None:
        return rank - 1
    if lines and at_right is None:
        return rank - (2 if right.dim() > 1 else 1)
    for value, where in (a, b):
        if isinstance(where, Rows) and where.axis >= value.dim() - 2:
            raise Mixes(f"{call.name} sums over the batch or combines different rows")
    # The remaining batch is in the axes before the matrices; a vector counts as a matrix.
    matrices = max(left.dim(), right.dim())
    return aligned(call, [a, b], matrices)


def convolution(call: Call) -> Placement:
    call.only("input")
    batched = call.arg("input").dim() == call.arg("weight").dim()
    if not batched or call.rows("input").axis != 0:
        raise Mixes(f"{call.name} runs over the batch")
    return call.at(0)


def attention(call: Call) -> Placement:
    operands = [(call.arg(name), call.of(name)) for name in ("query", "key", "value", "attn_mask")]
    operands = [(value, where) for value, where in operands if value is not None]
    if call.arg("dropout_p", 0.0) and not call.trains:
        raise Mixes(f"{call.name} drops out at random")
    rank = call.result.dim()
    for value, where in operands[:3]:
        if not isinstance(where, Rows):
            raise Unknown(f"{call.name} attends from rows to what is not a row")
        if where.axis >= value.dim() - 2:
            raise Mixes(f"{call.name} attends from row to row")
    axis = aligned(call, operands, rank)
    return call.at(axis)


def einsum(call: Call) -> Placement:
    equation = call.arg("equation").replace(" ", "")
    if "." in equation or "->" not in equation:
        raise Unknown(f"{call.name} of {equation} is not supported")
    terms, result = equation.split("->")
    places = list(zip(terms.split(","), call.of("tensors"), strict=True))
    letters = {term[where.axis] for term, where in places if isinstance(where, Rows)}
    if len(letters) != 1:
        raise Mixes(f"{call.name} of {equation} combines different rows")
    (letter,) = letters
    fixed = any(letter in term for term, where in places if not isinstance(where, Rows))
    if fixed or result.count(letter) != 1 or any(term.count(letter) > 1 for term, _ in places):
        raise Mixes(f"{call.name} of {equation} sums over the batch")
    return call.at(result.index(letter))


def recurrent(call: Call) -> Any:
    """LSTM, GRU and plain cells: the batch is axis 1 of the states, and axis 1 or 0 of the input."""
    call.only("input", "hx")
    batch = 0 if call.arg("batch_first") else 1
    states = call.of("hx") if isinstance(call.of("hx"), list) else [call.of("hx")]
    if call.arg("train") or call.rows("input").axis != batch or call.arg("input").dim() != 3:
        raise Mixes(f"{call.name} runs over the batch")
    if any(not isinstance(state, Rows) or state.axis != 1 for state in states):
        raise Mixes(f"{call.name} begins with a state that is not of the same rows")
    result = call.result
    return tuple(call.at(batch if place == 0 else 1, value) for place, value in enumerate(result))

"""Tensors whose elements are known functions of their index, for any size: positions, and masks of them.

A tensor of integers is known if each element is `const + step0 * i0 + step1 * i1 + ...`. A tensor of booleans
is known if an element is true where some such sums are not negative: for a column and a row of `arange(n)`,
`row <= column` is `i0 - i1 >= 0`.

This covers the masks of Hugging Face's models, including packed sequences, and holds for all sizes, which a
sample would not show. Masks that are computed from an input are not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

aten = torch.ops.aten
_WIDE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Sum:
    """An integer tensor: `const`, and the difference per step along each axis."""

    const: sympy.Expr
    steps: tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class All:
    """A boolean tensor: true where no sum is negative, and everywhere if there are no sums."""

    sums: frozenset[Sum]
    rank: int


@dataclass(frozen=True)
class Never:
    """A boolean tensor that is false everywhere."""

    rank: int


Known = Sum | All | Never | None
IndexRule = Callable[["IndexValues", fx.Node], Known]
_RULES: dict[Any, IndexRule] = {}


class IndexValues:
    """The known values of a graph's nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._known: dict[fx.Node, Known] = {}

    def of(self, node: Any) -> Known:
        """The known value of a node or a number; None if it is not known."""
        if isinstance(node, bool):
            return All(frozenset(), 0) if node else Never(0)
        if isinstance(node, int):
            return Sum(sympy.Integer(node), ())
        if not isinstance(node, fx.Node):
            return None
        if node not in self._known:
            self._known[node] = None  # while its inputs are visited
            self._known[node] = self._look(node)
        return self._known[node]

    def _look(self, node: fx.Node) -> Known:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            return Sum(_size(value), ())
        if not isinstance(value, torch.Tensor):
            return None
        if node.op == "get_attr":
            return of_tensor(getattr(self.module, str(node.target), None))
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        known = rule(self, node) if rule is not None else None
        if isinstance(known, Sum) and value.dtype not in _WIDE:  # a narrow integer may wrap around
            return None
        return None if known is None else _fitted(known, value)


def of_tensor(value: Any) -> Known:
    """The known value of a constant tensor."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or not 0 < value.numel() <= 1 << 22:
        return None
    if value.dtype is torch.bool:
        if bool(value.all()):
            return All(frozenset(), value.dim())
        return None if bool(value.any()) else Never(value.dim())
    first = int(value.flatten()[0])
    origin = (0,) * value.dim()
    steps = []
    expected = torch.full((), first)
    for axis, size in enumerate(value.shape):
        place = (*origin[:axis], 1, *origin[axis + 1 :])
        steps.append(int(value[place]) - first if size > 1 else 0)
        shape = [1] * value.dim()
        shape[axis] = size
        expected = expected + steps[-1] * torch.arange(size).reshape(shape)
    if not bool((expected == value.cpu()).all()):
        return None
    return Sum(sympy.Integer(first), tuple(map(sympy.Integer, steps)))


def _rule(*targets: Any) -> Callable[[IndexRule], IndexRule]:
    def register(rule: IndexRule) -> IndexRule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def _size(value: Any) -> sympy.Expr:
    return sympy.Integer(value) if isinstance(value, int) else value.node.expr


def _fitted(known: Sum | All | Never, value: torch.Tensor) -> Known:
    """The same values over the result's axes; an axis of size 1 has no step."""
    if isinstance(known, Never):
        return Never(value.dim())
    if isinstance(known, All):
        fitted = [_fitted(item, value) for item in known.sums]
        sums = frozenset(item for item in fitted if isinstance(item, Sum) and not _never_negative(item))
        return All(sums, value.dim())
    steps = (*(sympy.Integer(0),) * (value.dim() - len(known.steps)), *known.steps)
    return Sum(
        known.const, tuple(sympy.Integer(0) if n == 1 else s for s, n in zip(steps, value.shape, strict=True))
    )


def _never_negative(known: Sum) -> bool:
    return all(part.is_number and part >= 0 for part in (known.const, *known.steps))


def _joined(a: Sum, b: Sum, sign: int) -> Sum:
    rank = max(len(a.steps), len(b.steps))
    zeros = (sympy.Integer(0),) * rank
    left, right = ((*zeros, *item.steps)[-rank:] if rank else () for item in (a, b))
    return Sum(
        sympy.expand(a.const + sign * b.const), tuple(x + sign * y for x, y in zip(left, right, strict=True))
    )


@_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(values: IndexValues, node: fx.Node) -> Known:
    arguments = [values.of(arg) for arg in node.args]
    if node.meta["val"].is_floating_point() or not all(isinstance(item, Sum) for item in arguments):
        return None
    numbers = [item.const for item in arguments if isinstance(item, Sum)]
    start = numbers[0] if len(numbers) > 1 else sympy.Integer(0)
    return Sum(start, (numbers[2] if len(numbers) > 2 else sympy.Integer(1),))


@_rule(aten.ones.default, aten.new_ones.default, aten.ones_like.default)
def _ones(values: IndexValues, node: fx.Node) -> Known:
    return _constant(1, node)


@_rule(aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
def _zeros(values: IndexValues, node: fx.Node) -> Known:
    return _constant(0, node)


@_rule(aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default)
def _full(values: IndexValues, node: fx.Node) -> Known:
    number = node.args[0 if node.target is aten.scalar_tensor.default else -1 if len(node.args) < 3 else 2]
    return _constant(number, node) if isinstance(number, bool | int) else None


def _constant(number: int, node: fx.Node) -> Known:
    value = node.meta["val"]
    if value.dtype is torch.bool:
        return All(frozenset(), value.dim()) if number else Never(value.dim())
    if value.is_floating_point():
        return None
    return Sum(sympy.Integer(number), (sympy.Integer(0),) * value.dim())


@_rule(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
def _add(values: IndexValues, node: fx.Node) -> Known:
    a, b = values.of(node.args[0]), values.of(node.args[1])
    if not isinstance(a, Sum) or not isinstance(b, Sum) or node.kwargs or len(node.args) > 2:
        return None
    return _joined(a, b, -1 if node.target in (aten.sub.Tensor, aten.sub.Scalar) else 1)


@_rule(aten.unsqueeze.default)
def _unsqueeze(values: IndexValues, node: fx.Node) -> Known:
    axis = int(node.args[1]) % node.meta["val"].dim()  # type: ignore[arg-type]
    return _moved(values.of(node.args[0]), lambda s: (*s[:axis], sympy.Integer(0), *s[axis:]))


@_rule(aten.transpose.int, aten.t.default)
def _transpose(values: IndexValues, node: fx.Node) -> Known:
    rank = node.meta["val"].dim()
    a, b = (int(axis) % rank for axis in node.args[1:] or (0, 1)) if rank > 1 else (0, 0)  # type: ignore[arg-type]

    def swapped(steps: tuple[Any, ...]) -> tuple[Any, ...]:
        order = list(steps)
        if order:
            order[a], order[b] = order[b], order[a]
        return tuple(order)

    return _moved(values.of(node.args[0]), swapped)


@_rule(aten.expand.default, aten.clone.default, aten.alias.default, aten.contiguous.default)
def _same(values: IndexValues, node: fx.Node) -> Known:
    return values.of(node.args[0])


@_rule(aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout)
def _cast(values: IndexValues, node: fx.Node) -> Known:
    known, kind = values.of(node.args[0]), node.meta["val"].dtype
    if kind is torch.bool:
        return known if isinstance(known, All | Never) else None
    return known if isinstance(known, Sum) and kind in (torch.int32, torch.int64) else None


@_rule(aten.slice.Tensor)
def _slice(values: IndexValues, node: fx.Node) -> Known:
    arguments: list[Any] = [*node.args[1:], *[None] * (4 - len(node.args[1:]))]
    dim, start, _, step = arguments
    axis = (0 if dim is None else int(dim)) % node.meta["val"].dim()
    first = values.of(0 if start is None else start)
    if (
        step not in (None, 1)
        or not isinstance(first, Sum)
        or not (first.const.is_number and first.const >= 0)
    ):
        return None

    def shifted(item: Sum) -> Sum:
        return Sum(sympy.expand(item.const + first.const * item.steps[axis]), item.steps)

    known = values.of(node.args[0])
    if isinstance(known, All):
        return All(frozenset(map(shifted, known.sums)), known.rank)
    return shifted(known) if isinstance(known, Sum) else known


@_rule(aten.cat.default)
def _cat(values: IndexValues, node: fx.Node) -> Known:
    parts: Any = node.args[0]
    items = [values.of(part) for part in parts]
    axis = int(node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].dim()  # type: ignore[arg-type]
    if not all(isinstance(item, Sum) for item in items):
        return None
    # One sum must give every part from where it starts; it is computed from the last part.
    whole = items[-1]
    widths = [_size(part.meta["val"].shape[axis]) for part in parts]
    before = sum(widths[:-1], sympy.Integer(0))
    assert isinstance(whole, Sum)
    whole = Sum(sympy.expand(whole.const - before * whole.steps[axis]), whole.steps)
    start = sympy.Integer(0)
    for item, width in zip(items, widths, strict=True):
        assert isinstance(item, Sum)
        steps = item.steps if width != 1 else (*item.steps[:axis], whole.steps[axis], *item.steps[axis + 1 :])
        if steps != whole.steps or sympy.expand(whole.const + start * whole.steps[axis] - item.const) != 0:
            return None
        start += width
    return whole


@_rule(aten.cumsum.default)
def _cumsum(values: IndexValues, node: fx.Node) -> Known:
    known = values.of(node.args[0])
    zero = isinstance(known, Never) or (isinstance(known, Sum) and not known.const and not any(known.steps))
    return _constant(0, node) if zero else None


@_rule(aten.index.Tensor)
def _index(values: IndexValues, node: fx.Node) -> Known:
    known = values.of(node.args[0])
    if isinstance(known, Sum) and not any(known.steps):
        return Sum(known.const, ())
    if isinstance(known, All) and not known.sums:
        return All(frozenset(), 0)
    return Never(0) if isinstance(known, Never) else None


def _compare(difference: Callable[[Sum, Sum], Sum]) -> IndexRule:
    """The rule of an operator that is true where this difference of its operands is not negative."""

    def rule(values: IndexValues, node: fx.Node) -> Known:
        a, b = values.of(node.args[0]), values.of(node.args[1])
        if not isinstance(a, Sum) or not isinstance(b, Sum):
            return None
        margin = difference(a, b)
        return All(frozenset({margin}), len(margin.steps))

    return rule


_ONE = Sum(sympy.Integer(1), ())
_rule(aten.ge.Tensor, aten.ge.Scalar)(_compare(lambda a, b: _joined(a, b, -1)))
_rule(aten.le.Tensor, aten.le.Scalar)(_compare(lambda a, b: _joined(b, a, -1)))
_rule(aten.gt.Tensor, aten.gt.Scalar)(_compare(lambda a, b: _joined(_joined(a, b, -1), _ONE, -1)))
_rule(aten.lt.Tensor, aten.lt.Scalar)(_compare(lambda a, b: _joined(_joined(b, a, -1), _ONE, -1)))


@_rule(aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar)
def _equal(values: IndexValues, node: fx.Node) -> Known:
    a, b = values.of(node.args[0]), values.of(node.args[1])
    if not isinstance(a, Sum) or not isinstance(b, Sum):
        return None
    known = _joined(a, b, -1)
    if any(known.steps) or not known.const.is_number:
        return None
    equal = (known.const == 0) == (node.target in (aten.eq.Tensor, aten.eq.Scalar))
    return All(frozenset(), 0) if equal else Never(0)


@_rule(aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(values: IndexValues, node: fx.Node) -> Known:
    a, b = values.of(node.args[0]), values.of(node.args[1])
    if isinstance(a, Never) or isinstance(b, Never):
        return Never(0)
    if not isinstance(a, All) or not isinstance(b, All):
        return None
    value = node.meta["val"]
    both = (_fitted(a, value), _fitted(b, value))
    return All(frozenset().union(*(item.sums for item in both if isinstance(item, All))), value.dim())


def _moved(known: Known, move: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Known:
    if isinstance(known, Sum):
        return Sum(known.const, move(known.steps))
    if isinstance(known, All):
        return All(frozenset(Sum(item.const, move(item.steps)) for item in known.sums), known.rank)
    return known

"""Products of activations that are rounded to 8 bits by weights of 8 bits: integers multiply integers.

Quantizers write activations as multiples of a scale, of each row or of the whole tensor. What computes the
scale, and what multiplies by it in the end, stays as the model has it; between the two there is one node:

    x ─ div ─ round ─ clamp ─ to int8 ─┐                              x ─ div ─ integer_linear ─ mul
     scale ─┘         int8 ─ t ─ _int_mm ─ mul ─ mul          ──►      scale ─┘      │            └─ scale
                                    scale ─┘      └─ scale of a row              weight, scale of a row

Some write numbers again before they multiply: pt2e by `dequantize`, compressed-tensors by `round(x / s) * s`.
A product of such numbers is the same in integers but for rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from intarsia.lower.constants import Values, constants_of
from intarsia.lower.lowered import note_left, note_replaced
from intarsia.lower.purity import dequantizes
from intarsia.quantized import INTEGER_LINEAR, LINEAR, multiplies_integers_exactly

aten = torch.ops.aten

_RESHAPES = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.flatten.using_ints,
    }
)
_CASTS = frozenset({aten._to_copy.default, aten.to.dtype})
_ZEROS = frozenset({aten.zeros_like.default, aten.zeros.default})
_FULL = frozenset({aten.full_like.default, aten.full.default})
_DESCRIBES = ("val", "nn_module_stack", "stack_trace")
_LEFT = "these products of rounded activations are computed in floats"


@dataclass(frozen=True)
class _Steps:
    """Activations in steps of their scale, and the integers that they are rounded to.

    NaN becomes `nan`, if not NaN again. `factor` is the scale, if numbers were multiplied by it before.
    """

    x: fx.Node
    low: int = -128
    high: int = 127
    nan: int | None = 0
    factor: float | fx.Node = 1.0


class _Unmatched(Exception):
    """Why activations that are rounded are multiplied as floats."""


def find_integer_products(module: fx.GraphModule) -> None:
    """Let one node stand for rounding activations and multiplying them by a weight of 8 bits."""
    matcher: _Matcher | None = None
    left: dict[str, list[str]] = {}
    for node in list(module.graph.nodes):
        if node.target not in (aten._int_mm.default, LINEAR) and not _reads_dequantized(node):
            continue
        x = node.args[0].meta["val"]
        # Of one column `torch._int_mm` makes any numbers (torch 2.13, x86_64).
        if x.device.type != "cpu" or x.shape[-1] == 1:
            continue
        matcher = matcher or _Matcher(module)
        try:
            if node.target is aten._int_mm.default:
                matcher.replace_product(node)
            else:
                matcher.replace_linear(node)
        except _Unmatched as reason:
            left.setdefault(str(reason), []).append(node.name)
    note_left(module, _LEFT, left)


def _reads_dequantized(node: fx.Node) -> bool:
    """Whether it multiplies activations by a weight that a `dequantize` operator makes."""
    if node.target not in (
        aten.linear.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
    ):
        return False
    return all(
        isinstance(one, fx.Node) and dequantizes(_before_reshapes(one).target) for one in node.args[:2]
    )


class _Matcher:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.constants, self.values = constants_of(module), Values(module)

    def replace_product(self, product: fx.Node) -> None:
        """Put the node in place of a product of integers and the cast of its sums to float32."""
        x, weight = product.args
        assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
        if weight not in self.constants or weight.meta["val"].dtype is not torch.int8:
            return
        columns = self.values.of(weight)
        rounded, sums = x, product
        if x.meta["val"].dtype is torch.uint8:
            rounded, sums = _less_128(x), self.corrected(product, columns)  # type: ignore[assignment]
        cast = _only_user(sums)
        if rounded is None or cast is None or cast.target not in _CASTS or _dtype(cast) is not torch.float32:
            return
        with self.graph.inserting_before(product):
            steps = self.steps(rounded)
            flat = _call(self.graph, aten.reshape.default, steps.x, [-1, columns.shape[0]])
        scale = self.absorbed_scale(cast, columns.shape[1])
        self.put(cast, replace(steps, x=flat), columns.t(), scale)

    def replace_linear(self, product: fx.Node) -> None:
        """Put the node, the scale of the activations and the bias in place of a product of numbers."""
        is_packed = product.target is LINEAR
        if not is_packed and product.target is not aten.linear.default:
            raise _Unmatched("convolutions have no exact kernel for integers")
        with self.graph.inserting_before(product):
            steps = self.steps_of_numbers(product.args[0])
        if steps is None:
            return
        _floats_only(product)
        if not multiplies_integers_exactly():
            raise _Unmatched("PyTorch's products of 8-bit integers saturate on this processor")
        if not (0 <= -steps.low <= 255 and steps.high - steps.low <= 255):
            raise _Unmatched(f"activations are rounded to integers from {steps.low} to {steps.high}")
        weight, scale = self.packed(product) if is_packed else self.dequantized(product.args[1])
        bias = product.args[4] if is_packed else (*product.args, None)[2]
        if isinstance(steps.factor, float):
            scale = scale * steps.factor
        self.put(product, steps, weight, scale)
        last = product
        for target, other in ((aten.mul.Tensor, steps.factor), (aten.add.Tensor, bias)):
            if isinstance(other, fx.Node):
                with self.graph.inserting_after(last):
                    following = self.graph.call_function(target, (last, other))
                following.meta = {key: item for key, item in product.meta.items() if key in _DESCRIBES}
                last.replace_all_uses_with(following)
                following.args = (last, other)  # which the line above replaced, too
                last = following

    def steps_of_numbers(self, x: Any) -> _Steps | None:
        """The integers that numbers stand for, if these are multiples of one scale for each row."""
        reshapes, numbers = [], x
        while numbers.target in _RESHAPES:
            reshapes.append(numbers)
            numbers = numbers.args[0]
        steps = None
        if dequantizes(numbers.target):
            steps = self.quantized_steps(numbers)
        elif numbers.target is aten.mul.Tensor:
            steps = self.rounded_steps(numbers)
        if steps is None or (reshapes and isinstance(steps.factor, fx.Node)):
            return None
        moved = steps.x
        for node in reversed(reshapes):
            moved = _call(self.graph, node.target, moved, *node.args[1:], **node.kwargs)
        return replace(steps, x=moved)

    def quantized_steps(self, numbers: fx.Node) -> _Steps:
        """Of a pair of operators of pt2e."""
        integers = numbers.args[0]
        assert isinstance(integers, fx.Node)
        if not str(integers.target).startswith("quantized_decomposed.quantize_per_tensor"):
            raise _Unmatched("their integers do not come from a rounding of the whole tensor")
        settings = [self.number(value) for value in numbers.args[1:5]]
        if None in settings or settings != [self.number(value) for value in integers.args[1:5]]:
            raise _Unmatched("they are rounded by one scale and read by another")
        scale, zero, low, high = map(float, settings)  # type: ignore[arg-type]
        _floats_only(integers.args[0])
        if not 0 < scale < math.inf:
            raise _Unmatched(f"the scale of their activations is {scale}")
        x = _call(self.graph, aten.mul.Tensor, integers.args[0], 1.0 / scale)  # type: ignore[arg-type]
        return _Steps(x, int(low - zero), int(high - zero), int(-zero), scale)

    def rounded_steps(self, numbers: fx.Node) -> _Steps | None:
        """Of numbers that are rounded between a division by their scale and a product with it."""
        for integers, scale in (numbers.args, numbers.args[::-1]):
            described = scale.meta.get("val") if isinstance(scale, fx.Node) else None
            if not isinstance(described, torch.Tensor) or not isinstance(integers, fx.Node):
                continue
            if described.numel() != 1 and described.shape[-1] != 1:
                continue
            if integers.target is aten.sub.Tensor and _is_rounding(integers.args[0]):
                raise _Unmatched("the zero points of their activations are computed, or in a tensor")
            if not _is_rounding(integers):
                continue
            inner = integers.args[0]
            clamp = integers if integers.target is aten.clamp.default else inner
            low, high = (*clamp.args[1:], None, None)[:2]  # type: ignore[union-attr]
            is_whole = all(isinstance(end, int | float) and float(end).is_integer() for end in (low, high))
            if is_whole:
                _floats_only(integers)
                return _Steps(inner.args[0], int(low), int(high), None, scale)  # type: ignore[union-attr, arg-type]
        return None

    def number(self, value: Any) -> float | None:
        """A number, or the only one of a constant."""
        if isinstance(value, int | float):
            return value
        held = self.values.of(value) if value in self.constants else None
        return held.item() if held is not None and held.numel() == 1 else None

    def packed(self, product: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of a product as int8, and the scale of each row."""
        _, weight, scale, zero, _, bits = product.args
        held, scales = self.values.of(weight), self.values.of(scale)  # type: ignore[arg-type]
        if bits != 8 or held.shape[1] != 1 or zero is not None or held.dtype is not torch.uint8:
            layout = (
                str(held.dtype)
                if held.is_floating_point()
                else (
                    "zero points" if zero is not None else f"{bits} bits in {held.shape[1]} groups of columns"
                )
            )
            raise _Unmatched(f"their weights have {layout}")
        return (held[:, 0] ^ 128).view(torch.int8), scales[:, 0].float()

    def dequantized(self, weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of what pt2e reads by one scale for each row, or for all."""
        by_row = "per_channel" in str(weight.target)
        integers, scale, zero = weight.args[:3]
        if integers not in self.constants or weight.kwargs or _dtype(integers) is not torch.int8:
            raise _Unmatched("their weights are not constants of int8")
        if not self.is_zero(zero) or (by_row and weight.args[3] != 0):
            raise _Unmatched("their weights have zero points, or scales of columns")
        held = self.values.of(integers)
        return held, self.values.factor(scale).float().reshape(-1).expand(len(held))

    def corrected(self, product: fx.Node, columns: torch.Tensor) -> fx.Node | None:
        """What subtracts the sums that 128 too many make, if it reads the product."""
        user = _only_user(product)
        if user is None or user.target is not aten.sub.Tensor or user.args[1] not in self.constants:
            return None
        added = columns.sum(0, keepdim=True, dtype=torch.int32) * 128
        return user if torch.equal(self.values.factor(user.args[1]), added) else None

    def steps(self, integers: fx.Node) -> _Steps:
        """Where integers are made of floats, those; else the integers as floats."""
        cast = _before_reshapes(integers)
        clamp = _before_reshapes(cast.args[0]) if cast.target in _CASTS else cast
        if clamp.target is aten.clamp.default and clamp.meta["val"].dtype is torch.float32:
            low, high = (*clamp.args[1:], None, None)[:2]
            if isinstance(low, int) and isinstance(high, int) and -128 <= low <= high <= 127:
                return _Steps(self.before_rounding(clamp.args[0]), low, high)
        return _Steps(_call(self.graph, aten._to_copy.default, cast, dtype=torch.float32))

    def before_rounding(self, node: Any) -> fx.Node:
        """What `round(x)`, to which 0 may be added, rounds; other nodes are taken as they are."""
        rounding = _before_reshapes(node)
        if rounding.target is aten.add.Tensor and self.is_zero(rounding.args[1]):
            rounding = _before_reshapes(rounding.args[0])
        return rounding.args[0] if rounding.target is aten.round.default else node  # type: ignore[return-value]

    def is_zero(self, value: Any) -> bool:
        """Whether it is known to hold zeros alone; torchao fills a zero point like the scale."""
        if not isinstance(value, fx.Node):
            return bool(value == 0)
        if value in self.constants:
            return not bool(self.values.of(value).any())
        source = _before_reshapes(value)
        while source.target in _CASTS:
            source = _before_reshapes(source.args[0])
        return source.target in _ZEROS or (source.target in _FULL and bool(source.args[1] == 0))

    def absorbed_scale(self, cast: fx.Node, rows: int) -> torch.Tensor | None:
        """The scales of a weight, if a result is multiplied by them last; that multiplication is removed."""
        by_activation = _only_user(cast)
        by_weight = None if by_activation is None else _only_user(by_activation)
        if by_activation is None or by_weight is None:
            return None
        if {by_activation.target, by_weight.target} != {aten.mul.Tensor}:
            return None
        scale = by_weight.args[1]
        held = self.values.of(scale) if scale in self.constants else None  # type: ignore[arg-type]
        if held is None or {held.dtype, _dtype(by_activation)} != {torch.float32}:
            return None
        if held.numel() != held.shape[-1:].numel() or held.numel() not in (1, rows):
            return None
        by_weight.replace_all_uses_with(by_activation)
        self.graph.erase_node(by_weight)
        return held.reshape(-1).expand(rows)

    def put(self, old: fx.Node, steps: _Steps, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Turn another node into the product of integers."""
        described = old.meta["val"]

        def constant(part: str, value: torch.Tensor) -> fx.Node:
            name = f"_packed_{old.name}_{part}"
            self.module.__dict__[name] = value
            attribute = self.graph.create_node("get_attr", name)
            attribute.meta["val"] = described.new_empty(value.shape, dtype=value.dtype)
            return attribute

        with self.graph.inserting_before(old):
            held = constant("weight", weight.contiguous())
            scales = None if scale is None else constant("scale", scale.contiguous())
        replaced = [old.target]
        old.target, old.kwargs = INTEGER_LINEAR, {}
        old.args = (steps.x, held, scales, steps.low, steps.high, steps.nan)
        note_replaced(old, replaced)


def _less_128(integers: fx.Node) -> fx.Node | None:
    """The int8 that uint8 were made of by adding 128: so torchao does where there is no faster product."""
    cast = _before_reshapes(integers)
    added = cast.args[0] if cast.target in _CASTS else None
    if not isinstance(added, fx.Node) or added.target is not aten.add.Tensor or added.args[1] != 128:
        return None
    wide = _before_reshapes(added.args[0])
    source = wide.args[0] if wide.target in _CASTS else None
    return source if isinstance(source, fx.Node) and _dtype(source) is torch.int8 else None


def _before_reshapes(node: Any) -> fx.Node:
    while node.target in _RESHAPES:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _is_rounding(node: Any) -> bool:
    """Whether numbers are rounded and limited, in either order."""
    pair = {aten.round.default, aten.clamp.default}
    if not isinstance(node, fx.Node) or node.target not in pair:
        return False
    return {node.target, getattr(node.args[0], "target", None)} == pair


def _floats_only(node: Any) -> None:
    """Refuse half precision: what it rounds to differs from what the same steps in float32 round to."""
    if (dtype := _dtype(node)) is not torch.float32:
        raise _Unmatched(f"they are computed in {dtype}")


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _call(graph: fx.Graph, target: Any, source: fx.Node, *rest: Any, **named: Any) -> fx.Node:
    """A new node of one that is there, described as that is."""
    node = graph.call_function(target, (source, *rest), named)
    value = source.meta["val"]
    with torch.no_grad():
        node.meta = {**source.meta, "val": target(value, *rest, **named)}
    return node

"""Products of activations that are rounded to 8 bits by weights of 8 bits: integers multiply integers.

Quantizers write activations as multiples of a scale, of each row or of the whole tensor. What computes the
scale, and what multiplies by it in the end, stays as the model has it; between the two there is one node:

    x ─ div ─ round ─ clamp ─ to int8 ─┐                              x ─ div ─ integer_linear ─ mul
     scale ─┘         int8 ─ t ─ _int_mm ─ mul ─ mul          ──►      scale ─┘      │            └─ scale
                                    scale ─┘      └─ scale of a row              weight, scale of a row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intarsia.lower.constants import Values, constants_of
from intarsia.lower.lowered import note_replaced
from intarsia.quantized import INTEGER_LINEAR

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


@dataclass(frozen=True)
class _Steps:
    """Activations in steps of their scale, and the integers that they are rounded to."""

    x: fx.Node
    low: int = -128
    high: int = 127


def find_integer_products(module: fx.GraphModule) -> None:
    """Let one node stand for rounding activations and multiplying them by a weight of 8 bits."""
    products = [node for node in module.graph.nodes if node.target is aten._int_mm.default]
    matcher = _Matcher(module) if products else None
    for product in products:
        if matcher is not None and product.meta["val"].device.type == "cpu":
            matcher.replace_product(product)


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
        self.replace(cast, _Steps(flat, steps.low, steps.high), columns.t(), scale)

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
        return held.reshape(-1).expand(rows).contiguous()

    def replace(self, old: fx.Node, steps: _Steps, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Put the node in place of another."""
        described = old.meta["val"]

        def constant(part: str, value: torch.Tensor) -> fx.Node:
            name = f"_packed_{old.name}_{part}"
            self.module.__dict__[name] = value
            attribute = self.graph.create_node("get_attr", name)
            attribute.meta["val"] = described.new_empty(value.shape, dtype=value.dtype)
            return attribute

        with self.graph.inserting_before(old):
            held = constant("weight", weight.contiguous())
            scales = None if scale is None else constant("scale", scale)
        replaced = [old.target]
        old.target, old.kwargs = INTEGER_LINEAR, {}
        old.args = (steps.x, held, scales, steps.low, steps.high)
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

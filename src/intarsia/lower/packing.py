"""Products whose weights are computed from integers alone: the weights stay in few bits.

A quantized model unpacks its integers, subtracts zero points and multiplies by scales at every call, and each
library does so in its own way. All of this is constant, so it is computed here, one weight at a time, and
packed in one layout. The packed weight must equal the model's in every bit; otherwise the model's operators
stay, and a note says why.

    integers ─ shifts ─ masks ─ order ─┐
                     zero points ─ sub ┴─ mul ─ moves ─ linear          quantized_linear
                              scales ─ order ─┘           │        ──►    │  weight, scale, zero
                                              activation ─┘               └ activation, its columns in order
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from intarsia.lower.constants import FLOATS_OF_8_BITS, Values, behind, constants_of
from intarsia.lower.lowered import note_left, note_replaced
from intarsia.memory import release_freed, release_mapped
from intarsia.quantized import EMBEDDING, LINEAR, dequantized

aten = torch.ops.aten

_BLOCKS = (256, 128, 64, 32, 16)  # columns; scales of smaller groups would take as much memory as integers
_SHORT_BLOCK = 64  # columns; a row with one scale is not divided into smaller blocks
_AT_A_TIME = 1 << 20  # numbers that are compared at once
_FEWEST_BITS = 2  # of a weight; constants with fewer bytes of integers are indices, not the weight
# Products and lookups: the place of the weight, and whether its rows are the columns of the product's result.
_READERS: dict[Any, tuple[int, bool]] = {
    aten.linear.default: (1, False),
    aten.mm.default: (1, True),
    aten.matmul.default: (1, True),
    aten.addmm.default: (2, True),
    aten.embedding.default: (0, False),
}
# Operators that only move elements of their first argument.
_MOVES = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.reshape.default,
        aten.view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.unsqueeze.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.index_select.default,
        aten.index.Tensor,
        aten.slice.Tensor,
        aten.detach.default,
        aten.alias.default,
    }
)
_CASTS = frozenset({aten._to_copy.default, aten.to.dtype})


class _Unpackable(Exception):
    """Why a weight is not packed."""


@dataclass(frozen=True)
class _Packed:
    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    order: torch.Tensor | None  # of the columns, if those of a group are not consecutive


def pack_weights(module: fx.GraphModule) -> None:
    """Make products and embeddings read packed weights where the model dequantizes them."""
    constants = constants_of(module)
    packed: dict[tuple[fx.Node, bool], _Packed] = {}
    left: dict[str, list[str]] = {}
    for node in list(module.graph.nodes):
        place, turned = _READERS.get(node.target, (0, False)) if node.op == "call_function" else (0, False)
        source = node.args[place] if node.target in _READERS else None
        if not isinstance(source, fx.Node) or source.op != "call_function" or not constants.get(source):
            continue
        if not _reads_activation(node, constants):
            continue
        name = f"_packed_{source.name}{'_turned' * turned}"
        try:
            if (source, turned) not in packed:
                packed[source, turned] = _attached(module, name, _packed(module, source, turned))
                release_freed()  # without it, 12 layers of 11 million weights kept 500 MB of matrices
                release_mapped(getattr(module, str(n.target)) for n in behind(source) if n.op == "get_attr")
            _replace(module, node, packed[source, turned], name)
        except _Unpackable as reason:
            left.setdefault(str(reason), []).append(node.name)
    note_left(module, "these weights are not stored in few bits", left)


def _reads_activation(node: fx.Node, constants: dict[fx.Node, int]) -> bool:
    """Whether a product multiplies a value of the call by a matrix that is computed from enough integers."""
    place, _ = _READERS[node.target]
    weight = node.args[place].meta["val"]  # type: ignore[union-attr]
    operand: Any = node.args[1 - place] if node.target is not aten.addmm.default else node.args[1]
    if weight.ndim != 2 or not weight.dtype.is_floating_point or weight.numel() == 0:
        return False
    if not isinstance(operand, fx.Node) or operand in constants:
        return False
    if constants[node.args[place]] * 8 < weight.numel() * _FEWEST_BITS:  # type: ignore[index]
        return False
    value = operand.meta.get("val")
    if node.target is aten.matmul.default and isinstance(value, torch.Tensor) and value.ndim < 2:
        return False
    # On a GPU, compilers have products of their own for the operators of quantization libraries.
    return isinstance(value, torch.Tensor) and {value.device.type, weight.device.type} == {"cpu"}


def _packed(module: fx.GraphModule, weight: fx.Node, turned: bool) -> _Packed:
    """A packed weight, compared with the model's.

    As few matrices as possible are in memory at a time, since each may have eight times the size of the
    result.
    """
    values = Values(module)
    origin, moves = _origin(weight)
    leaves = [values.of(one).dtype for one in behind(origin) if one.op == "get_attr"]
    float8 = next((dtype for dtype in leaves if dtype in FLOATS_OF_8_BITS), None)

    def matrix(side: torch.Tensor) -> torch.Tensor:
        moved = _moved(values, moves, side.expand(shape))
        return moved.t() if turned else moved

    shape: Any = origin.meta["val"].shape
    integers, scale = map(matrix, _factors(values, origin, float8))
    result = _laid_out(integers, scale) if float8 is None else _laid_out_floats(integers.to(float8), scale)
    del integers, scale
    result = replace(result, weight=values.held(weight, result.weight))
    dense = values.of(weight)
    if not _stands_for(result, dense.t() if turned else dense):
        raise _Unpackable("after rescaling, its integers give other numbers than the model computes")
    return result


def _stands_for(packed: _Packed, dense: torch.Tensor) -> bool:
    """Whether a packed weight equals the model's, bit for bit."""
    size = max(1, _AT_A_TIME // dense.shape[1])
    for row in range(0, len(dense), size):
        rows = slice(row, row + size)
        zero = None if packed.zero is None else packed.zero[rows]
        again = dequantized(packed.weight[rows], packed.scale[rows], zero, packed.bits, dense.dtype)
        expected = dense[rows] if packed.order is None else dense[rows, packed.order]
        if not torch.equal(again, expected):
            return False
    return True


def _origin(weight: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The product of integers and scales that computes a weight, and the nodes that move its elements."""
    node, moves = weight, list[fx.Node]()
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        if node.target in _MOVES:
            moves.append(node)
        elif node.target not in _CASTS or not _is_float(node.args[0]):
            break
        node = node.args[0]
    return node, moves[::-1]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _moved(values: Values, moves: Sequence[fx.Node], tensor: torch.Tensor) -> torch.Tensor:
    for node in moves:
        args, kwargs = values.arguments(node)
        tensor = node.target(tensor, *args, **kwargs)  # type: ignore[operator]
    return tensor


def _factors(
    values: Values, origin: fx.Node, float8: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers minus their zero points, or the floats of 8 bits, and the scales."""
    whole_of = _whole if float8 is None else partial(_short, dtype=float8)
    if origin.op == "get_attr" or origin.target in _CASTS:
        numbers = values.of(origin)
        integers = whole_of(numbers)
        if integers is None:
            raise _Unpackable("its numbers are neither integers nor scaled")
        dtype = numbers.dtype if numbers.dtype.is_floating_point else torch.float32
        return integers, torch.ones((), dtype=dtype, device=numbers.device)
    if origin.target is not aten.mul.Tensor:
        raise _Unpackable(f"it ends in {origin.target}, not in a product of integers and scales")
    dtype = origin.meta["val"].dtype
    sides: Any = sorted(origin.args, key=lambda arg: -_numel(arg))  # scales may be integers, too
    for integers, scale in (sides, sides[::-1]):
        if (whole := whole_of(values.factor(integers))) is not None:
            return whole, values.factor(scale).to(dtype)
    if float8 is not None:
        raise _Unpackable("its floats have zero points")
    raise _Unpackable("it scales numbers that are not integers")  # but a table's, say


def _numel(arg: Any) -> int:
    return arg.meta["val"].numel() if isinstance(arg, fx.Node) else 1


def _whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """Numbers as int16 if all are integers; otherwise None."""
    result = tensor.to(torch.int16)
    flat, short = tensor.flatten(), result.flatten()
    parts = (slice(at, at + _AT_A_TIME) for at in range(0, len(flat), _AT_A_TIME))
    return result if all(bool((flat[part] == short[part]).all()) for part in parts) else None


def _short(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Numbers, if floats of 8 bits hold them. They are moved in a longer type: few operators take 8 bits."""
    return tensor if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) else None


def _laid_out_floats(floats: torch.Tensor, scale: torch.Tensor) -> _Packed:
    """Floats of 8 bits, likewise."""
    blocks = _blocks(_group_size(scale), floats.shape[1])
    if not blocks:
        raise _Unpackable("its groups of floats of 8 bits are not a multiple of 16")
    grouped = floats.reshape(len(floats), -1, blocks[0])
    return _Packed(grouped.contiguous(), scale[:, :: blocks[0]].contiguous(), None, 8, None)


def _laid_out(integers: torch.Tensor, scale: torch.Tensor) -> _Packed:
    """Integers and the scale of each, both in rows by columns, in the layout of `intarsia.quantized`."""
    order = None
    columns = integers.shape[1]
    size = _group_size(scale)
    if not _blocks(size, columns):
        order = _order_of_groups(scale)
        integers, scale = integers[:, order], scale[:, order]
        size = _group_size(scale)
    if not (blocks := _blocks(size, columns)):
        raise _Unpackable(
            f"its groups have {size} weights, and those that are not a multiple of 16 are not handled"
        )
    for bits in (4, 8) if columns % 2 == 0 else (8,):
        for block in blocks:
            if (zero := _zeros(integers, block, bits)) is None:
                continue
            numbers = (integers.reshape(*zero.shape, block) + zero.unsqueeze(2)).to(torch.uint8)
            weight = numbers[..., ::2] | numbers[..., 1::2] << 4 if bits == 4 else numbers
            zeros = None if bool((zero == 2 ** (bits - 1)).all()) else zero.to(torch.uint8).contiguous()
            # Contiguous: a result of a transposed matrix is transposed, too, and engines would copy it.
            return _Packed(weight.contiguous(), scale[:, ::block].contiguous(), zeros, bits, order)
    raise _Unpackable("the integers of a group need more than 8 bits")


def _blocks(size: int, columns: int) -> list[int]:
    """Sizes of blocks in a group of columns, the largest first: zero points may need smaller ones."""
    blocks = [block for block in _BLOCKS if size % block == 0]
    is_row = size == columns and (not blocks or blocks[0] < _SHORT_BLOCK)
    return [columns, *blocks] if is_row else blocks


def _zeros(integers: torch.Tensor, group: int, bits: int) -> torch.Tensor | None:
    """A zero point for each group that makes its numbers unsigned; None if they need more bits."""
    grouped = integers.reshape(len(integers), -1, group)
    low, high = grouped.amin(2), grouped.amax(2)
    middle, most = 2 ** (bits - 1), 2**bits - 1
    if bool(((low >= -middle) & (high < middle)).all()):
        return torch.full_like(low, middle)
    zero = (-low).clamp(min=0)
    return zero if bool(((zero <= most) & (high + zero <= most)).all()) else None


def _group_size(scale: torch.Tensor) -> int:
    """The largest size of groups of consecutive columns in which all columns have the same scales."""
    differs = (scale[:, 1:] != scale[:, :-1]).any(0).nonzero().flatten() + 1
    return math.gcd(scale.shape[1], *differs.tolist())


def _order_of_groups(scale: torch.Tensor) -> torch.Tensor:
    """An order of the columns in which those with the same scales are consecutive (GPTQ's `desc_act`)."""
    # Sums of integers wrap, so they do not depend on the order of addition.
    bits = scale.contiguous().view(torch.int32 if scale.itemsize == 4 else torch.int16).long()
    factors = torch.arange(1, 2 * len(bits), 2, device=bits.device) * 0x9E3779B97F4A7C1
    sums = (bits * factors[:, None]).sum(0)
    _, numbers, counts = torch.unique(sums, return_inverse=True, return_counts=True)
    if int(counts.min()) != int(counts.max()):
        raise _Unpackable("its groups have different numbers of columns")
    order: torch.Tensor = numbers.argsort(stable=True)
    return order


def _attached(module: fx.GraphModule, prefix: str, packed: _Packed) -> _Packed:
    for name in ("weight", "scale", "zero", "order"):
        tensor = getattr(packed, name)
        if tensor is not None:
            module.__dict__[f"{prefix}_{name}"] = tensor
    return packed


def _replace(module: fx.GraphModule, node: fx.Node, packed: _Packed, name: str) -> None:
    target, described = node.target, node.meta["val"]
    if target is aten.embedding.default and packed.order is not None:
        raise _Unpackable("the columns of an embedding have an order of their own")
    if target is aten.embedding.default and packed.weight.is_floating_point():
        raise _Unpackable("PyTorch looks up no floats of 8 bits")

    def constant(part: str) -> fx.Node | None:
        value = getattr(packed, part)
        if value is None:
            return None
        attribute = module.graph.create_node("get_attr", f"{name}_{part}")
        attribute.meta["val"] = described.new_empty(value.shape, dtype=value.dtype)
        return attribute

    with module.graph.inserting_before(node):
        x, bias = (node.args[1], None) if target is aten.embedding.default else _operands(node)
        weight, scale, zero, order = map(constant, ("weight", "scale", "zero", "order"))
        if order is not None:
            ordered = module.graph.call_function(aten.index_select.default, (x, -1, order))
            ordered.meta = {**x.meta, "val": x.meta["val"].clone(memory_format=torch.contiguous_format)}  # type: ignore[union-attr]
            x = ordered
    if target is aten.embedding.default:
        node.target, node.args = EMBEDDING, (x, weight, scale, zero, packed.bits, described.dtype)
    else:
        node.target, node.args = LINEAR, (x, weight, scale, zero, bias, packed.bits)
    node.kwargs = {}
    note_replaced(node, [target])


def _operands(node: fx.Node) -> tuple[Any, Any]:
    """The activation and the bias of a product."""
    if node.target is not aten.addmm.default:
        return node.args[0], node.args[2] if len(node.args) > 2 else None
    bias, x = node.args[:2]
    if node.kwargs or bias.meta["val"].ndim != 1:  # type: ignore[union-attr]
        raise _Unpackable("its product is added to a matrix, or multiplied by a number")
    return x, bias

"""Nodes that run as one kernel: products with bias, activation, norm, gate or residual; attention."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import attach, constant, only_user, shape_of
from intarsia.engines.graph_rewrites.products import groups_of, merge
from intarsia.engines.triton_kernels.operators import SIZES, masked_attention, row_product
from intarsia.lower.purity import arguments

if TYPE_CHECKING:
    from intarsia.lower.index_values import IndexValues

aten = torch.ops.aten


# Products with bias and activation in one kernel: relu, and gelu where the model asks for its tanh form.
#
# cuBLAS applies them while it writes the result. Its gelu is the tanh form, off by up to 5e-4 from the exact
# one, so a model with the exact one keeps a kernel of its own for it.


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@torch.library.custom_op("intarsia::addmm_activation", mutates_args=(), device_types="cuda")
def addmm_activation(
    bias: torch.Tensor, one: torch.Tensor, other: torch.Tensor, use_gelu: bool
) -> torch.Tensor:
    """`relu(addmm(...))`, or gelu of the tanh form: an operator of ours, which compilers do not decompose."""
    return torch._addmm_activation(bias, one, other, use_gelu=use_gelu)


@addmm_activation.register_fake
def _(bias: torch.Tensor, one: torch.Tensor, other: torch.Tensor, use_gelu: bool) -> torch.Tensor:
    return one.new_empty((one.shape[0], other.shape[1]))


def activation_epilogues(module: fx.GraphModule) -> int:
    """Move activations into the products that they follow; how many there were."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _on_gpu(node) or shape_of(node) is None:
            continue
        if not _is_product(module, node):
            continue
        last, use_gelu = _activation(_viewed(node))
        if last is None:
            continue
        with module.graph.inserting_before(last):
            result = _fused(module.graph, node, use_gelu)
            shaped = module.graph.call_function(aten.reshape.default, (result, list(shape_of(last) or ())))
        shaped.meta = dict(last.meta)
        last.replace_all_uses_with(shaped)
        count += 1
    if count:
        module.graph.eliminate_dead_code()
    return count


def _on_gpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cuda and value.dim() >= 2


def _is_product(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is a product of matrices with a constant bias along its last axis."""
    if node.target is aten.linear.default:
        return constant(module, arguments(node)["bias"]) is not None
    if node.target is not aten.addmm.default:
        return False
    operands = arguments(node)
    bias = constant(module, operands["self"])
    return bias is not None and bias.dim() == 1 and operands["beta"] == operands["alpha"] == 1


def _viewed(node: fx.Node) -> fx.Node:
    """The product, or the view of it that alone is read."""
    user = only_user(node)
    return user if node.target is aten.addmm.default and user and user.target in _VIEWS else node


def _fused(graph: fx.Graph, node: fx.Node, use_gelu: bool) -> fx.Node:
    arguments_of = arguments(node)
    if node.target is aten.addmm.default:
        operands = (arguments_of["self"], arguments_of["mat1"], arguments_of["mat2"])
    else:
        features = (shape_of(arguments_of["input"]) or (0,))[-1]
        flat = graph.call_function(aten.reshape.default, (arguments_of["input"], [-1, features]))
        operands = (
            arguments_of["bias"],
            flat,
            graph.call_function(aten.t.default, (arguments_of["weight"],)),
        )
    return graph.call_function(torch.ops.intarsia.addmm_activation.default, (*operands, use_gelu))


def _activation(node: fx.Node) -> tuple[fx.Node | None, bool]:
    """The node that makes the activation of a product that nobody else reads, and whether it is a gelu."""
    user = only_user(node)
    if user is not None and user.target in (aten.relu.default, aten.relu_.default):
        return user, False
    if user is not None and user.target is aten.gelu.default:
        return (user, True) if arguments(user)["approximate"] == "tanh" else (None, False)
    return _written_out(node), True


def _written_out(x: fx.Node) -> fx.Node | None:
    """`0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`, as models write it; its last node."""
    users = list(x.users)
    half = next((n for n in users if _scaled(n, x) == 0.5), None)
    cube = next((n for n in users if n.target is aten.pow.Tensor_Scalar and n.args[1] == 3), None)
    if half is None or cube is None or len(users) != 3:
        return None
    inner: fx.Node | None = cube
    for step in (0.044715, x, math.sqrt(2 / math.pi), aten.tanh.default, 1.0, half):
        previous, inner = inner, only_user(inner) if inner is not None else None
        if inner is None or not _does(inner, previous, step):
            return None
    return inner if only_user(half) is inner else None


def _does(node: fx.Node, previous: Any, step: Any) -> bool:
    """Whether a node is this step: tanh, a factor, a summand (1.0 or x), or the product with half of x."""
    if step is aten.tanh.default:
        return node.target is step
    if isinstance(step, fx.Node):
        wanted = aten.mul.Tensor if _scaled_half(step) else aten.add.Tensor
        return node.target is wanted and set(node.args) == {previous, step} and not node.kwargs
    if step == 1.0:
        return node.target in (aten.add.Tensor, aten.add.Scalar) and node.args == (previous, 1.0)
    factor = _scaled(node, previous)
    return factor is not None and math.isclose(factor, step, rel_tol=1e-6)


def _scaled_half(node: fx.Node) -> bool:
    return node.target in (aten.mul.Tensor, aten.mul.Scalar) and 0.5 in node.args


def _scaled(node: fx.Node, x: Any) -> float | None:
    """The factor of a node that multiplies `x` by a number."""
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return None
    numbers = [value for value in node.args if isinstance(value, int | float)]
    return float(numbers[0]) if len(numbers) == 1 and x in node.args else None


# Products of one row on a GPU by a kernel that also does what is around them: norm, gate, residual sum.
#
# Such a product reads its weight once and does little else, so every kernel beside it costs about as much
# as a product itself. A token of a decoder is five kernels a layer then.


_LONGEST = 16384  # of a row that one program holds
_CASTS = (aten.to.dtype, aten._to_copy.default)


def row_products(module: fx.GraphModule) -> int:
    """Let the kernel make the products of one row; how many there were."""
    for nodes in groups_of(module):
        if all(_is_row(module, node) for node in nodes) and not _gate_of(nodes):
            merge(module, nodes)
    count = 0
    for node in list(module.graph.nodes):
        # What another one gates is part of that one, and read by nobody.
        if node.op == "call_function" and node.users and _is_row(module, node):
            _replace(module, node)
            count += 1
    module.graph.eliminate_dead_code()
    return count


def _is_row(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.target is not aten.linear.default:
        return False
    operands, shape = arguments(node), shape_of(node)
    weight = constant(module, operands["weight"])
    if shape is None or weight is None or not weight.is_cuda or weight.ndim != 2:
        return False
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    is_short = weight.shape[1] <= _LONGEST and math.prod(shape[:-1]) == 1
    return (
        is_half
        and is_short
        and weight.is_contiguous()
        and operands["input"].meta["val"].dtype == weight.dtype
    )


def _replace(module: fx.GraphModule, node: fx.Node) -> None:
    """One product, or two where one gates the other, with the norm before and the residual after it."""
    operands: dict[str, Any] = arguments(node)
    pair = _gate_of([node, *_beside(node)])
    x, norm, eps = _normed(module, operands["input"]) or (operands["input"], None, 0.0)
    last, residual = node, None
    if pair is not None:
        first, second, last = pair
        with module.graph.inserting_before(node):
            weight, bias = (
                None
                if arguments(first)[name] is None
                else attach(
                    module,
                    f"_gated_{node.name}_{name}",
                    torch.cat([getattr(module, arguments(one)[name].target) for one in (first, second)]),
                )
                for name in ("weight", "bias")
            )
    else:
        weight, bias = operands["weight"], operands["bias"]
        user = only_user(node)
        if user is not None and _is_sum(user) and shape_of(user) == shape_of(node):
            last, residual = user, next(arg for arg in user.args if arg is not node)
    with module.graph.inserting_before(last):
        result = module.graph.call_function(
            row_product._opoverload, (x, weight, bias, norm, residual, eps, pair is not None)
        )
    result.meta = dict(last.meta)
    last.replace_all_uses_with(result)
    module.graph.erase_node(last)


def _beside(node: fx.Node) -> list[fx.Node]:
    """Other products of the same input."""
    source = arguments(node)["input"]
    return [user for user in source.users if user is not node and user.target is aten.linear.default]


def _gate_of(nodes: list[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The gating product, the gated product, and the node that multiplies them; None without a gate."""
    for first in nodes:
        silu = only_user(first)
        gate = only_user(silu) if silu is not None and silu.target is aten.silu.default else None
        if gate is None or gate.target is not aten.mul.Tensor or len(nodes) != 2:
            continue
        second = nodes[1 - nodes.index(first)]
        alike = shape_of(first) == shape_of(second) and only_user(second) is gate
        if alike and (arguments(first)["bias"] is None) == (arguments(second)["bias"] is None):
            return first, second, gate
    return None


def _is_sum(node: fx.Node) -> bool:
    is_sum = node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2
    values = [arg.meta.get("val") if isinstance(arg, fx.Node) else None for arg in node.args]
    described = node.meta.get("val")
    return is_sum and all(
        isinstance(value, torch.Tensor)
        and isinstance(described, torch.Tensor)
        and (value.shape, value.dtype) == (described.shape, described.dtype)
        for value in values
    )


def _normed(module: fx.GraphModule, node: Any) -> tuple[fx.Node, fx.Node, float] | None:
    """The input, weight and epsilon of an RMS norm, as models write it; None for other nodes."""
    if node.target is aten.slice.Tensor and shape_of(node) == shape_of(node.args[0]):
        node = node.args[0]  # the last token, of one
    if node.target is not aten.mul.Tensor:
        return None
    weights = [arg for arg in node.args if constant(module, arg) is not None]
    scaled = [arg for arg in node.args if isinstance(arg, fx.Node) and arg not in weights]
    if len(weights) != 1 or len(scaled) != 1 or scaled[0].target not in _CASTS:
        return None
    product: Any = scaled[0].args[0]
    if product.target is not aten.mul.Tensor:
        return None
    root: Any
    wide: Any
    wide, root = product.args
    mean_eps: Any = root.args[0] if isinstance(root, fx.Node) and root.target is aten.rsqrt.default else None
    if mean_eps is None or mean_eps.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    mean, eps = mean_eps.args
    if not isinstance(eps, float) or mean.target is not aten.mean.dim or list(mean.args[1]) != [-1]:
        return None
    square = mean.args[0]
    is_square = square.target is aten.pow.Tensor_Scalar and tuple(square.args) == (wide, 2)
    if not is_square or wide.target not in _CASTS or wide.meta["val"].dtype != torch.float32:
        return None
    source, weight = wide.args[0], constant(module, weights[0])
    described = source.meta["val"]
    if weight is None or weight.shape != described.shape[-1:]:
        return None
    return (source, weights[0], eps) if weight.dtype == described.dtype == node.meta["val"].dtype else None


# Attention by one kernel that keeps no scores: flash without a mask, one of ours with a mask.
#
# PyTorch takes cuDNN's kernel on Hopper GPUs, which clears memory first; for short sequences flash is faster.
# BERT at batch 1 went from 0.469 to 0.450 ms without it (H200). Long sequences stay with cuDNN: with flash,
# Whisper's encoder (1500 places) took 0.648 ms, and by torch.compile, which takes cuDNN's, 0.605.
#
# With a mask PyTorch makes numbers of booleans in every layer, lays them out in rows of a multiple of 8, and
# takes slower kernels. BERT at batch 8 took 0.669 ms with a mask by ours, 0.724 by theirs, and 0.662
# without. A mask of padding and of later positions is taken apart, since a kernel reads one row of padding in
# 11 us and a mask of all pairs in 17 (heads of GPT-2, 32 rows of 128 tokens).

_MOST = 256  # features of a head that the flash kernel knows
_LONG = 1024  # keys


def flash_attention(module: fx.GraphModule) -> int:
    """Name the kernel at every attention that one of the two can run; how many there were."""
    from intarsia.lower.index_values import IndexValues  # sympy, which loading a program does without

    count, values = 0, IndexValues(module)
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not aten.scaled_dot_product_attention.default:
            continue
        given = arguments(node)
        with module.graph.inserting_before(node):
            if _is_flash(given):
                made = module.graph.call_function(
                    aten._scaled_dot_product_flash_attention.default,
                    (given["query"], given["key"], given["value"], 0.0, given["is_causal"]),
                    {"scale": given["scale"]},
                )
                result = module.graph.call_function(operator.getitem, (made, 0))
            elif _is_masked(given):
                operands = [given[name] for name in ("query", "key", "value")]
                size = int(given["query"].meta["val"].shape[-1])
                scale = size**-0.5 if given["scale"] is None else given["scale"]
                mask, is_causal = _without_causal(module, values, given["attn_mask"])
                operands += [mask, scale, is_causal]
                result = module.graph.call_function(masked_attention._opoverload, tuple(operands))
            else:
                continue
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        count += 1
    return count


def _is_flash(given: dict[str, Any]) -> bool:
    sizes = _sizes(given)
    if sizes is None or given["attn_mask"] is not None or given["enable_gqa"]:
        return False
    query, key, values = sizes
    # With is_causal and unequal lengths the kernels mean different corners.
    if given["is_causal"] and query[2] != key[2]:
        return False
    if isinstance(key[2], int) and key[2] >= _LONG:
        return False
    return query[:2] == key[:2] and key == values and query[3] <= _MOST and query[3] % 8 == 0


def _is_masked(given: dict[str, Any]) -> bool:
    sizes, mask = _sizes(given), given["attn_mask"]
    if sizes is None or mask is None or given["is_causal"]:
        return False
    described = mask.meta.get("val")
    if described is None or not (described.dtype == torch.bool or described.is_floating_point()):
        return False
    query, key, values = sizes
    shares = query[1] == key[1] or (given["enable_gqa"] and query[1] % key[1] == 0)
    return query[0] == key[0] and key == values and shares and query[3] in SIZES


def _without_causal(module: fx.GraphModule, values: IndexValues, mask: fx.Node) -> tuple[fx.Node, bool]:
    """The mask of padding in a mask that hides padding and later positions; otherwise the mask as it is."""
    from intarsia.lower.masks import ANDS, MaskKind, mask_kind

    both: Any = mask
    while both.target is aten.expand.default:
        both = both.args[0]
    if both.target in ANDS and mask.meta["val"].dtype == torch.bool:
        for causal, padding in (both.args, both.args[::-1]):
            if isinstance(padding, fx.Node) and mask_kind(module, values, causal) is MaskKind.CAUSAL:
                return padding, True
    return mask, False


def _sizes(given: dict[str, Any]) -> list[list[Any]] | None:
    """The four sizes of queries, keys and values, in half precision on a GPU, numbers or expressions."""
    described = [given[name].meta.get("val") for name in ("query", "key", "value")]
    if given["dropout_p"] or any(value is None or value.dim() != 4 for value in described):
        return None
    if described[0].dtype not in (torch.float16, torch.bfloat16) or not described[0].is_cuda:
        return None
    sizes = [
        [size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape]
        for value in described
    ]
    # Heads and their features are the model's; only rows and lengths vary.
    fixed = all(isinstance(size, int) for value in sizes for size in (value[1], value[3]))
    return sizes if fixed and sizes[0][3] == sizes[1][3] else None

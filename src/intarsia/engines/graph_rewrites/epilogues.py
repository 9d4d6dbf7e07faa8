"""Products with bias and activation in one kernel: relu, and gelu where the model asks for its tanh form.

cuBLAS applies them while it writes the result. Its gelu is the tanh form, so that a model with the exact one
keeps a kernel of its own for it.

cuBLAS has the tanh form of GELU in its epilogue, off by up to 5e-4 from the exact one, so only models that
ask for that form get it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, constant, only_user, shape_of

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@torch.library.custom_op("intarsia::addmm_activation", mutates_args=(), device_types="cuda")
def addmm_activation(
    bias: torch.Tensor, one: torch.Tensor, other: torch.Tensor, use_gelu: bool
) -> torch.Tensor:
    """`relu(addmm(...))`, or gelu of the tanh form: an operator of ours, which no compiler takes apart."""
    return torch._addmm_activation(bias, one, other, use_gelu=use_gelu)


@addmm_activation.register_fake
def _(bias: torch.Tensor, one: torch.Tensor, other: torch.Tensor, use_gelu: bool) -> torch.Tensor:
    return one.new_empty((one.shape[0], other.shape[1]))


def activation_epilogues(module: fx.GraphModule) -> int:
    """Move activations into the products that they follow; how many there were."""
    found = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _on_gpu(node) or shape_of(node) is None:
            continue
        if not _is_product(module, node):
            continue
        last, use_gelu = _activation(_viewed(node))
        if last is None:
            continue
        with module.graph.inserting_before(last):
            made = _fused(module.graph, node, use_gelu)
            shaped = module.graph.call_function(aten.reshape.default, (made, list(shape_of(last) or ())))
        shaped.meta = dict(last.meta)
        last.replace_all_uses_with(shaped)
        found += 1
    if found:
        module.graph.eliminate_dead_code()
    return found


def _on_gpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cuda and value.dim() >= 2


def _is_product(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is a product of matrices with a constant bias along its last axis."""
    if node.target is aten.linear.default:
        return constant(module, arguments(node)["bias"]) is not None
    if node.target is not aten.addmm.default:
        return False
    given = arguments(node)
    bias = constant(module, given["self"])
    return bias is not None and bias.dim() == 1 and given["beta"] == given["alpha"] == 1


def _viewed(node: fx.Node) -> fx.Node:
    """The product, or the view of it that alone is read."""
    user = only_user(node)
    return user if node.target is aten.addmm.default and user and user.target in _VIEWS else node


def _fused(graph: fx.Graph, node: fx.Node, use_gelu: bool) -> fx.Node:
    given = arguments(node)
    if node.target is aten.addmm.default:
        operands = (given["self"], given["mat1"], given["mat2"])
    else:
        features = (shape_of(given["input"]) or (0,))[-1]
        flat = graph.call_function(aten.reshape.default, (given["input"], [-1, features]))
        operands = (given["bias"], flat, graph.call_function(aten.t.default, (given["weight"],)))
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

"""Constant folding: what depends on weights alone is computed once, unless that would blow it up."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intarsia.lower.purity import is_pure_operator

aten = torch.ops.aten

# A folded value may not take more memory than what it was made from, beyond this allowance.
ALLOWANCE = 1 << 20

# These repeat one element many times: an engine broadcasts for nothing, a folded copy would be stored whole.
_EXPANDING = frozenset(
    {
        aten.expand.default,
        aten.expand_as.default,
        aten.broadcast_to.default,
        aten.repeat.default,
        aten.tile.default,
    }
)
_FILLING = frozenset(
    {
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.full_like.default,
        aten.empty.memory_format,
    }
)
_DEQUANTIZING = "quantized_decomposed.dequantize"


def fold_constants(module: fx.GraphModule) -> None:
    """Replace nodes whose inputs are all constant by their value; never an expanded or random one."""
    known: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if isinstance(value, torch.Tensor):
                known[node] = value
        elif node.op == "call_function" and _foldable(node, known):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    for node, value in known.items():
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        if all(user in known for user in node.users):
            continue  # an inner value of a folded chain; dead once its readers are folded
        name = f"_folded_{node.name}"
        module.__dict__[name] = value
        with module.graph.inserting_before(node):
            constant = module.graph.create_node("get_attr", name)
        constant.meta = {key: item for key, item in node.meta.items() if key != "from_node"}
        node.replace_all_uses_with(constant)


def _foldable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if not all(source in known for source in node.all_input_nodes):
        return False
    target = node.target
    result = node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload):
        # getitem of a folded tuple; arithmetic on sizes is not constant
        return bool(node.all_input_nodes) and target.__name__ == "getitem" if callable(target) else False
    if not is_pure_operator(target) or dequantizes(target):
        return False
    values = result if isinstance(result, list | tuple) else [result]
    if not all(isinstance(value, torch.Tensor) and _is_static(value) for value in values):
        return False
    size = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
    sources = sum(_bytes(known[source]) for source in node.all_input_nodes)
    if target in _EXPANDING or target in _FILLING:
        return size <= max(sources, 64)
    return size <= sources + ALLOWANCE


def dequantizes(target: object) -> bool:
    """Whether it makes numbers of quantised values; of weights too: engines may want their integers."""
    return isinstance(target, torch._ops.OpOverload) and str(target).startswith(_DEQUANTIZING)


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(dim, int) for dim in value.shape)


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0

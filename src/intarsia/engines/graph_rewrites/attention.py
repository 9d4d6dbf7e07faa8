"""Attention by one kernel that keeps no scores: flash without a mask, one of ours with a mask.

PyTorch takes cuDNN's kernel on Hopper GPUs, which clears memory first; for short sequences flash is faster.
BERT at batch 1 went from 0.469 to 0.450 ms without it (H200). With a mask PyTorch makes numbers of booleans
in every layer, lays them out in rows of a multiple of 8, and takes slower kernels. BERT at batch 8 took
0.669 ms with a mask by ours, 0.724 by theirs, and 0.662 without a mask.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments
from intarsia.engines.kernels.operators import SIZES, masked_attention

aten = torch.ops.aten
_MOST = 256  # features of a head that the flash kernel knows


def flash_attention(module: fx.GraphModule) -> int:
    """Name the kernel at every attention that one of the two can run; how many there were."""
    found = 0
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
                operands = [given[name] for name in ("query", "key", "value", "attn_mask")]
                size = int(given["query"].meta["val"].shape[-1])
                scale = size**-0.5 if given["scale"] is None else given["scale"]
                result = module.graph.call_function(masked_attention._opoverload, (*operands, scale))
            else:
                continue
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        found += 1
    return found


def _is_flash(given: dict[str, Any]) -> bool:
    sizes = _sizes(given)
    if sizes is None or given["attn_mask"] is not None or given["enable_gqa"]:
        return False
    query, key, values = sizes
    # With is_causal and unequal lengths the kernels mean different corners.
    if given["is_causal"] and query[2] != key[2]:
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

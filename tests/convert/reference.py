"""What became of every target that the reference library converts."""

from __future__ import annotations

import builtins
import operator
from pathlib import Path
from typing import Any

import torch

from intarsia.convert.evaluators import EVALUATORS
from intarsia.convert.registry import registry
from intarsia.lower.decompositions import decomposition_table

TARGETS = Path(__file__).with_name("reference_targets.txt").read_text().split()

_COLLECTIVE = (
    "a collective of a multi-GPU TensorRT engine: it exists only where that library is loaded, and a"
    " piece given to an engine here never spans devices"
)
_RANDOM = "random: an engine would draw from a generator that torch does not know, so it stays in PyTorch"
_TENSORRT = "exists only where Torch-TensorRT is loaded"
# Targets without a counterpart here, each with the reason that docs/coverage.md prints.
REASONS = {
    "tensorrt_conv_asym_pad_op": f"{_TENSORRT}; asymmetric padding is a pad in front of the convolution",
    "torch.ops.tensorrt.conv_asym_pad.default": (
        f"{_TENSORRT}; asymmetric padding is a pad in front of the convolution"
    ),
    "torch.ops.tensorrt.quantize_op.default": (
        f"{_TENSORRT}; quantized_decomposed.quantize_* and dequantize_* are converted"
    ),
    "torch.ops.tensorrt.dynamic_block_quantize_op.default": (
        f"{_TENSORRT}; block scales in 4-bit floats have no CPU kernel in either engine"
    ),
    "tensorrt_fused_nccl_all_gather_op": _COLLECTIVE,
    "tensorrt_fused_nccl_all_reduce_op": _COLLECTIVE,
    "tensorrt_fused_nccl_all_to_all_op": _COLLECTIVE,
    "tensorrt_fused_nccl_gather_op": _COLLECTIVE,
    "tensorrt_fused_nccl_reduce_scatter_op": _COLLECTIVE,
    "tensorrt_fused_nccl_scatter_op": _COLLECTIVE,
    "torch.ops.aten.rand.default": _RANDOM,
    "torch.ops.aten.randn.default": _RANDOM,
    "torch.ops.aten.randperm.default": _RANDOM,
    "torch.ops.aten.atan2.out": "writes to its argument: lowering turns it into aten.atan2.default first",
    "torch.ops.aten.resize_.default": (
        "changes its argument in place: lowering turns it into the functional aten.resize.default first"
    ),
}

# Core ATen operators without a converter.
_MEMORY = "says how memory lies, which a tensor inside an engine does not have"
_GRADIENT = "a gradient: only a training graph has it, and a compiled module gives none"
CORE_REASONS = {
    "aten.sym_is_contiguous.default": _MEMORY,
    "aten.sym_stride.int": _MEMORY,
    "aten.sym_storage_offset.default": _MEMORY,
    **dict.fromkeys(
        (
            "aten._adaptive_avg_pool2d_backward.default",
            "aten.avg_pool2d_backward.default",
            "aten.convolution_backward.default",
            "aten.embedding_dense_backward.default",
            "aten.max_pool2d_with_indices_backward.default",
            "aten.native_group_norm_backward.default",
            "aten.native_layer_norm_backward.default",
        ),
        _GRADIENT,
    ),
}


def target_of(name: str) -> Any:
    """The operator a name of the list stands for; a packet becomes its one tensor overload."""
    if name.startswith("_operator."):
        return getattr(operator, name.removeprefix("_operator."))
    if not name.startswith("torch."):
        return getattr(builtins, name, None)
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found.default if isinstance(found, torch._ops.OpOverloadPacket) else found


def how(name: str) -> str | None:
    """`converter`, `evaluator`, `decomposition`, or why it has none; None if nobody has thought of it."""
    if name in REASONS:
        return REASONS[name]
    target = target_of(name)
    if target in registry:
        return "converter"
    if target in EVALUATORS:
        return "evaluator"
    return "decomposition" if target in decomposition_table() else None

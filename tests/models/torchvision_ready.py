"""torchvision, importable also where its compiled operators are not: its wheel for CUDA beside a CPU torch.

The wheel that a package index gives for x86_64 is built for CUDA, and its library does not load beside a
torch without it; then torchvision fails on import, and so do timm and Hugging Face. Its models need one
operator of that library, `nms`; it is written here in PyTorch, as another custom operator would be.
"""

from __future__ import annotations

import importlib.util

import torch


def prepare() -> bool:
    """Make `import torchvision` work; False where it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        _define_operators()
        import torchvision
    if not torchvision.extension._has_ops():
        torchvision.ops.boxes._assert_has_ops = lambda: None  # there is an nms now
    return True


def _define_operators() -> None:
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    torch.library.impl("torchvision::nms", "CPU", _nms)


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """The boxes to keep, best first: each that overlaps no better one by more than the threshold."""
    order = scores.sort(descending=True, stable=True).indices
    boxes = boxes[order]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    dropped = torch.zeros(len(boxes), dtype=torch.bool)
    kept = []
    for index in range(len(boxes)):
        if dropped[index]:
            continue
        kept.append(index)
        near = torch.maximum(boxes[index, :2], boxes[:, :2])
        far = torch.minimum(boxes[index, 2:], boxes[:, 2:])
        shared = (far - near).clamp(min=0).prod(1)
        dropped |= shared / (area[index] + area - shared) > iou_threshold
    return order[torch.tensor(kept, dtype=torch.long)]

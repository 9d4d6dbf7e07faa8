"""Models of torchvision with random weights, on small pictures."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.case import Call, Case
from tests.models.torchvision_ready import prepare

if not prepare():
    raise ImportError("torchvision is not installed")

import torchvision
from torchvision import models


def _classifier(name: str, side: int = 64, **settings: Any) -> Case:
    def make() -> Call:
        model = models.get_model(name, weights=None, num_classes=10, **settings)
        return Call(model, (torch.randn(1, 3, side, side),))

    return Case(name, "torchvision", make)


def _segmenter(name: str) -> Case:
    def make() -> Call:
        model = models.get_model(name, weights=None, weights_backbone=None, num_classes=4)
        return Call(model, (torch.randn(1, 3, 64, 64),))

    return Case(name, "torchvision", make)


def _video(name: str, frames: int = 4, side: int = 32, **settings: Any) -> Case:
    def make() -> Call:
        model = models.get_model(name, weights=None, num_classes=10, **settings)
        return Call(model, (torch.randn(1, 3, frames, side, side),))

    return Case(name, "torchvision", make)


def _detector(name: str, side: int = 64, **settings: Any) -> Case:
    def make() -> Call:
        model = models.get_model(name, weights=None, weights_backbone=None, num_classes=4, **settings)
        return Call(model, ([torch.rand(3, side, side)],))

    return Case(name, "torchvision", make)


def _mvit() -> Call:
    """MViT of three blocks: pooled attention, relative positions, a residual."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    def block(heads: int, entering: int, leaving: int, stride: list[int]) -> MSBlockConfig:
        return MSBlockConfig(heads, entering, leaving, [3, 3, 3], [3, 3, 3], stride, [1, 2, 2])

    model = MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=[block(1, 16, 16, [1, 1, 1]), block(2, 16, 32, [1, 2, 2]), block(2, 32, 32, [1, 1, 1])],
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=10,
    )
    return Call(model, (torch.randn(1, 3, 4, 32, 32),))


_SMALL = {"min_size": 64, "max_size": 64}
assert torchvision.__version__

CASES = [
    _classifier("resnet18"),
    _classifier("resnext50_32x4d"),
    _classifier("densenet121"),
    _classifier("googlenet", init_weights=False, aux_logits=False),
    _classifier("inception_v3", 96, init_weights=False, aux_logits=False),
    _classifier("squeezenet1_1"),
    _classifier("shufflenet_v2_x0_5"),
    _classifier("mnasnet0_5"),
    _classifier("mobilenet_v3_small"),
    _classifier("efficientnet_v2_s"),
    _classifier("efficientnet_b0"),
    _classifier("regnet_x_400mf"),
    _classifier("swin_t"),
    _classifier("swin_v2_t"),
    _segmenter("fcn_resnet50"),
    _segmenter("deeplabv3_mobilenet_v3_large"),
    _segmenter("lraspp_mobilenet_v3_large"),
    _video("r3d_18"),
    _video("mc3_18"),
    _video("r2plus1d_18"),
    _video("swin3d_t"),
    Case("mvit (v2 blocks)", "torchvision", _mvit),
    _detector("fasterrcnn_mobilenet_v3_large_320_fpn", **_SMALL),
    _detector("retinanet_resnet50_fpn", **_SMALL),
    _detector("ssdlite320_mobilenet_v3_large"),
    _detector("fcos_resnet50_fpn", **_SMALL),
    _detector("maskrcnn_resnet50_fpn", **_SMALL),
]

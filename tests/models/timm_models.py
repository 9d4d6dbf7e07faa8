"""Models of timm with random weights, cut down where their size can be given."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.case import Call, Case
from tests.models.torchvision_ready import prepare

if not prepare():
    raise ImportError("torchvision, which timm needs, is not installed")

import timm


def _timm(name: str, side: int = 64, double: bool = False, **settings: Any) -> Case:
    """In `double`, where random weights make a model chaotic: of tf_efficientnetv2_s eager float32 is a
    seventh off what float64 gives, and an input changed by 1e-6 moves the answer by a third."""
    dtype = torch.float64 if double else torch.float32

    def make() -> Call:
        model = timm.create_model(name, pretrained=False, num_classes=10, **settings)
        return Call(model.to(dtype), (torch.randn(1, 3, side, side, dtype=dtype),))

    return Case(name, "timm", make)


_MLP = {"img_size": 64}
_VIT = {"img_size": 64, "depth": 2}

CASES = [
    _timm("tf_efficientnetv2_s", 96, double=True),
    _timm("tf_efficientnet_b0.ns_jft_in1k"),
    _timm("efficientnet_es_pruned"),
    _timm("dm_nfnet_f0", 96),
    _timm("eca_nfnet_l0", 96),
    _timm("maxvit_nano_rw_256", 64, img_size=64),
    _timm("coatnet_nano_rw_224", 64, img_size=64),
    _timm("coat_lite_tiny", img_size=64),
    _timm("mixer_s32_224", **_MLP),
    _timm("gmlp_ti16_224", **_MLP),
    _timm("resmlp_12_224", **_MLP),
    _timm("edgenext_xx_small"),
    _timm("ghostnet_050"),
    _timm("hardcorenas_a"),
    _timm("mobilenetv4_conv_small"),
    _timm("fastvit_t8"),
    _timm("repvgg_a0"),
    _timm("mobileone_s0"),
    _timm("res2net50_14w_8s"),
    _timm("resnest14d"),
    _timm("skresnet18"),
    _timm("seresnet18"),
    _timm("dpn48b"),
    _timm("dla34"),
    _timm("vovnet39a"),
    _timm("hrnet_w18_small"),
    _timm("cspresnet50"),
    _timm("xcit_nano_12_p16_224", img_size=64, depth=2),
    _timm("cait_xxs24_224", **_VIT),
    _timm("deit3_small_patch16_224", **_VIT),
    _timm("eva02_tiny_patch14_224", 56, img_size=56, depth=2),
    _timm("visformer_tiny", img_size=64),
    _timm("crossvit_tiny_240", 240),
    _timm("pit_ti_224", 224),
    _timm("twins_svt_small", img_size=64),
    _timm("poolformerv2_s12"),
    _timm("convmixer_768_32"),
    _timm("inception_next_atto"),
    _timm("tiny_vit_5m_224", 224),
    _timm("efficientvit_b0"),
    _timm("nest_tiny_jx", img_size=64),
    _timm("sequencer2d_s", img_size=64, layers=(1, 1, 1, 1)),
    _timm("volo_d1_224", img_size=64),
    _timm("davit_tiny"),
    _timm("levit_conv_128s", 224),
    _timm("repvit_m0_9"),
    _timm("focalnet_tiny_srf"),
    _timm("tresnet_m"),
]

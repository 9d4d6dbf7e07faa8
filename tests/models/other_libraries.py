"""Models of diffusers, models quantized by torchao, and models that differentiate with torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import torchao
from tests.models.case import Call, Case
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
)

_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_STEP = torch.tensor([7])


def _unet() -> Call:
    model = diffusers.UNet2DModel(
        sample_size=16,
        **_BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Call(model, (torch.randn(1, 3, 16, 16), 7))


def _conditional_unet() -> Call:
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        **_BLOCKS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    return Call(model, (torch.randn(1, 4, 16, 16), _STEP, torch.randn(1, 5, 16)))


def _autoencoder() -> Call:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return Call(diffusers.AutoencoderKL(**_BLOCKS, **blocks), (torch.randn(1, 3, 32, 32),))


def _vector_autoencoder() -> Call:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = diffusers.VQModel(**_BLOCKS, **blocks, num_vq_embeddings=16)
    return Call(model, (torch.randn(1, 3, 32, 32),))


def _dit() -> Call:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8
    )
    arguments = {"timestep": _STEP, "class_labels": torch.tensor([3])}
    return Call(model, (torch.randn(1, 4, 8, 8),), arguments)


def _pixart() -> Call:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
    )
    given = {"resolution": None, "aspect_ratio": None}
    arguments = {
        "encoder_hidden_states": torch.randn(1, 5, 16),
        "timestep": _STEP,
        "added_cond_kwargs": given,
    }
    return Call(model, (torch.randn(1, 4, 8, 8),), arguments)


def _quantized(config: Any, width: int = 64) -> Callable[[], Call]:
    def make() -> Call:
        model = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width), nn.LayerNorm(width))
        torchao.quantize_(model, config)
        return Call(model, (torch.randn(4, width),))

    return make


class _Energy(nn.Module):
    """The energy of a system of particles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).squeeze(-1)


class _Forces(nn.Module):
    """The gradient of the energy, for each of several systems."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = _Energy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.func.vmap(torch.func.grad(self.energy))(x)


class _Lagrangian(_Forces):
    """Accelerations of a Lagrangian network: a Hessian, a Jacobian and a linear system."""

    def forward(self, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def energy(position: torch.Tensor, speed: torch.Tensor) -> torch.Tensor:
            return self.energy(torch.cat([position, speed])) + (speed * speed).sum()

        mass = torch.func.hessian(energy, 1)(q, v)
        mixed = torch.func.jacrev(torch.func.grad(energy, 1), 0)(q, v)
        return torch.linalg.solve(mass, torch.func.grad(energy)(q, v) - mixed @ v)


class _Residual(_Forces):
    """The residual of a heat equation: derivatives in time and space of a network."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.func.vmap(torch.func.jacfwd(self.energy))(x)
        second = torch.func.vmap(torch.func.hessian(self.energy))(x)
        return first[:, 0] - second[:, 1, 1]


CASES = [
    Case("UNet2DModel, a number as timestep", "diffusers", _unet),
    Case("UNet2DConditionModel", "diffusers", _conditional_unet),
    Case("AutoencoderKL", "diffusers", _autoencoder),
    Case("VQModel", "diffusers", _vector_autoencoder),
    Case("DiTTransformer2DModel", "diffusers", _dit),
    Case("PixArtTransformer2DModel", "diffusers", _pixart),
    Case("int8 weights", "torchao", _quantized(Int8WeightOnlyConfig())),
    Case("int8 weights and activations", "torchao", _quantized(Int8DynamicActivationInt8WeightConfig())),
    Case("float8 weights", "torchao", _quantized(Float8WeightOnlyConfig())),
    Case("forces (vmap of grad)", "torch.func", lambda: Call(_Forces(), (torch.randn(5, 6),))),
    Case(
        "Lagrangian network (hessian, jacrev)",
        "torch.func",
        lambda: Call(_Lagrangian(), (torch.randn(3), torch.randn(3))),
    ),
    Case("residual of the heat equation", "torch.func", lambda: Call(_Residual(), (torch.randn(5, 6),))),
]

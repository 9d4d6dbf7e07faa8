"""Small models of many shapes, for cutting."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    """conv - bn - relu (in place), twice, with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    """A stem, blocks, a head, and a part that is never used."""

    def __init__(self, width: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Skips that span the whole depth."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1 if i == 0 else width, width, 3, padding=1) for i in range(3)])
        self.up = nn.ModuleList([nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(3)])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        skips = []
        for conv in self.down:
            x = F.relu(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for conv in self.up:
            x = F.relu(conv(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1)))
        return {"mask": self.last(x), "deep": x}


def mlp() -> Made:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers), (torch.randn(4, 8),), {}


def resnet() -> Made:
    return ResNet(), (torch.randn(4, 3, 8, 8),), {}


def unet() -> Made:
    return UNet(), (torch.randn(4, 1, 8, 8),), {}


def _tokens() -> torch.Tensor:
    return torch.randint(0, 64, (4, 12))


def gpt2() -> Made:
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    mask = torch.ones(4, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    model = transformers.GPT2LMHeadModel(config)
    return model, (_tokens(),), {"attention_mask": mask, "use_cache": False}


def rotary(kind: str, layers: int = 2) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=64,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model, (_tokens(),), {"use_cache": False}

    return make


def t5() -> Made:
    import transformers

    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, (), {"input_ids": _tokens(), "decoder_input_ids": _tokens(), "use_cache": False}


ZOO: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "resnet": resnet,
    "unet": unet,
    "gpt2": gpt2,
    "llama": rotary("Llama"),
    "mistral": rotary("Mistral"),
    "qwen2": rotary("Qwen2"),
    "t5": t5,
}


def make(name: str) -> Made:
    torch.manual_seed(0)
    return ZOO[name]()


def calm(model: nn.Module) -> nn.Module:
    """The model with every dropout at zero, so that training mode draws nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model

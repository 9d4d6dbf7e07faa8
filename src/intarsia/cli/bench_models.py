"""The models of `intarsia bench`: the zoo's, and others that engines are known to differ on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from intarsia.cli import zoo
from intarsia.cli.zoo import Specimen
from intarsia.errors import IntarsiaError


def names() -> list[str]:
    """The models in the order they are measured in."""
    return [*zoo.names(), *_MORE]


def specimen(name: str, *, full: bool = True) -> Specimen:
    """A model by name, always with the same weights and inputs.

    >>> specimen("fno", full=False).args[0].shape
    torch.Size([1, 3, 32, 32])
    """
    if name in zoo.names():
        return zoo.specimen(name, full=full)
    if name not in _MORE:
        raise IntarsiaError(f"there is no model {name!r}; known are {', '.join(names())}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = _MORE[name](full)
    made.model.eval()
    return made


class _Spectral(nn.Module):
    """A layer of a Fourier neural operator: low frequencies mixed by complex weights, and a convolution."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft2(x)
        low = frequencies[..., : self.modes, : self.modes]
        mixed = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        height, width = frequencies.shape[-2:]
        padded = nn.functional.pad(mixed, (0, width - self.modes, 0, height - self.modes))
        return nn.functional.gelu(torch.fft.irfft2(padded, s=x.shape[-2:]) + self.local(x))


def _fno(full: bool) -> Specimen:
    width, modes, side, depth = (32, 16, 128, 4) if full else (4, 4, 32, 2)
    layers = [_Spectral(width, modes) for _ in range(depth)]
    model = nn.Sequential(nn.Conv2d(3, width, 1), *layers, nn.Conv2d(width, 1, 1))
    return Specimen(model, (torch.randn(1, 3, side, side),))


def _hf() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise IntarsiaError("the models need Hugging Face: pip install transformers") from error
    return transformers


def _tokens(full: bool, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, 128) if full else (1, 16))


def _image(full: bool) -> torch.Tensor:
    return torch.randn(1, 3, 224, 224) if full else torch.randn(1, 3, 64, 64)


def _mixtral(full: bool) -> Specimen:
    sizes = (512, 1024, 4, 8000) if full else (32, 64, 2, 100)
    config = _hf().MixtralConfig(
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_hidden_layers=sizes[2],
        vocab_size=sizes[3],
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        max_position_embeddings=256,
        use_cache=False,
    )
    return Specimen(_hf().MixtralForCausalLM(config), (_tokens(full, sizes[3]),))


def _poolformer(full: bool) -> Specimen:
    tiny = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    return Specimen(_hf().PoolFormerModel(_hf().PoolFormerConfig(**({} if full else tiny))), (_image(full),))


def _regnet(full: bool) -> Specimen:
    sizes = {
        "embedding_size": 32,
        "hidden_sizes": [64, 128, 288, 672],
        "depths": [1, 3, 8, 2],
        "groups_width": 16,
    }
    tiny = {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "groups_width": 8}
    return Specimen(_hf().RegNetModel(_hf().RegNetConfig(**(sizes if full else tiny))), (_image(full),))


def _albert(full: bool) -> Specimen:
    large = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    tiny = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "embedding_size": 16}
    config = _hf().AlbertConfig(**(large if full else {**tiny, "vocab_size": 100, "num_hidden_layers": 2}))
    return Specimen(_hf().AlbertModel(config), (_tokens(full, config.vocab_size),))


def _dinov2(full: bool) -> Specimen:
    small = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 224}
    tiny = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 56}
    image = torch.randn(1, 3, 224, 224) if full else torch.randn(1, 3, 56, 56)
    return Specimen(_hf().Dinov2Model(_hf().Dinov2Config(**(small if full else tiny))), (image,))


def _convnextv2(full: bool) -> Specimen:
    tiny = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
    return Specimen(_hf().ConvNextV2Model(_hf().ConvNextV2Config(**({} if full else tiny))), (_image(full),))


def _lstm(full: bool) -> Specimen:
    """A tagger: an embedding, two bidirectional layers, and a head."""
    vocabulary, width = (8000, 256) if full else (100, 8)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * width, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            tags: torch.Tensor = self.head(self.lstm(self.embed(ids))[0])
            return tags

    return Specimen(Tagger(), (_tokens(full, vocabulary),))


_MORE: dict[str, Callable[[bool], Specimen]] = {
    maker.__name__.removeprefix("_"): maker
    for maker in (_albert, _convnextv2, _dinov2, _fno, _lstm, _mixtral, _poolformer, _regnet)
}

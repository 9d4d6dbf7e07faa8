"""The models of `python -m bench.models`: the zoo's, and others that engines are known to differ on."""

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


class _PooledAttention(nn.Module):
    """Attention of a multiscale vision transformer: queries, keys and values pooled over the image."""

    def __init__(self, width: int, heads: int, query_stride: int, key_stride: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        strides = (query_stride, key_stride, key_stride)
        self.pools = nn.ModuleList(nn.Conv2d(width, width, 3, s, 1, groups=width) for s in strides)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in strides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, height, width, channels) to the same, smaller by the stride of the queries."""
        pooled = []
        for part, pool, norm in zip(self.qkv(x).chunk(3, -1), self.pools, self.norms, strict=True):
            pooled.append(norm(pool(part.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        q, k, v = (p.flatten(1, 2).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in pooled)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v) + q
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2).view_as(pooled[0]))
        return made


class _PooledBlock(nn.Module):
    def __init__(self, width: int, wider: int, heads: int, query_stride: int, key_stride: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _PooledAttention(width, heads, query_stride, key_stride)
        self.skip = nn.MaxPool2d(3, query_stride, 1) if query_stride > 1 else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, wider))
        self.widen = nn.Linear(width, wider) if wider != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.skip(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = skip + self.attention(self.before(x))
        normed = self.after(x)
        made: torch.Tensor = self.widen(x) + self.mlp(normed)
        return made


def _mvit(full: bool) -> Specimen:
    """A multiscale vision transformer for images: four stages, each half as wide in pixels."""
    width, depths = (96, (1, 2, 5, 2)) if full else (8, (1, 1, 1, 1))
    blocks: list[nn.Module] = []
    for stage, depth in enumerate(depths):
        for number in range(depth):
            wider = width * 2 if number == depth - 1 and stage < 3 else width
            stride = 2 if number == 0 and stage > 0 else 1
            blocks.append(_PooledBlock(width, wider, 2**stage, stride, max(1, 4 >> stage)))
            width = wider

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 96 if full else 8, 7, 4, 3)
            self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
            self.head = nn.Linear(width, 1000 if full else 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen = self.norm(self.blocks(self.patches(image).permute(0, 2, 3, 1)))
            scores: torch.Tensor = self.head(seen.mean((1, 2)))
            return scores

    return Specimen(Classifier(), (_image(full),))


_MORE: dict[str, Callable[[bool], Specimen]] = {
    maker.__name__.removeprefix("_"): maker
    for maker in (_albert, _convnextv2, _dinov2, _fno, _lstm, _mixtral, _mvit, _poolformer, _regnet)
}

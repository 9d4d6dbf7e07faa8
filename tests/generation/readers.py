"""Tiny encoders with decoders, with random weights, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=128,
    d_model=64,
    pad_token_id=0,
    eos_token_id=None,
    decoder_start_token_id=2,
    tie_word_embeddings=False,
)
_BART: dict[str, Any] = dict(
    **_SIZES,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    bos_token_id=1,
    init_std=0.3,  # so that tokens differ from each other, and a wrong one shows
)
_T5: dict[str, Any] = dict(
    **_SIZES,
    d_kv=16,
    d_ff=96,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=24,
    initializer_factor=2.0,
)


def _t5(layers: int) -> Any:
    config = hf.T5Config(**_T5, num_layers=layers, num_decoder_layers=layers)
    return hf.T5ForConditionalGeneration(config)


def _bart(layers: int) -> Any:
    sizes = {"encoder_layers": layers, "decoder_layers": layers, "max_position_embeddings": 256}
    return hf.BartForConditionalGeneration(hf.BartConfig(**_BART, **sizes, forced_eos_token_id=None))


def _whisper(layers: int) -> Any:
    config = hf.WhisperConfig(
        **_BART,
        encoder_layers=layers + 1,  # caches are made with as many layers as the encoder has
        decoder_layers=layers,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=256,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return hf.WhisperForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[int], Any]] = {"t5": _t5, "bart": _bart, "whisper": _whisper}


def tiny(family: str, layers: int = 1) -> Any:
    """A model of the family, in evaluation, that generates until it is told to stop."""
    torch.manual_seed(0)
    model = FAMILIES[family](layers).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.forced_eos_token_id = None
    return model


def reading(family: str, rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Something to read; tokens have padding, on the right as tokenizers of encoders put it."""
    generator = torch.Generator().manual_seed(1)
    if family == "whisper":
        return {"input_features": torch.randn(rows, 8, 24, generator=generator)}
    ids = torch.randint(3, 128, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, length // 2 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}

"""Tiny decoders of every family, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=0.3,  # so that tokens differ from each other, and a wrong one shows
)
_MIXED = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_SIZES)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_SIZES, sliding_window=12)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_SIZES, head_dim=16)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_SIZES, head_dim=16, sliding_window=12)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_SIZES, head_dim=16, sliding_window=12, layer_types=_MIXED)
    ),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**_SIZES)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=128,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            initializer_range=0.3,
        )
    ),
}


def tiny(family: str) -> Any:
    """A model of the family, in evaluation, that generates until it is told to stop."""
    torch.manual_seed(0)
    return endless(FAMILIES[family]())


def smallest() -> Any:
    """A Llama of one layer."""
    torch.manual_seed(0)
    return endless(hf.LlamaForCausalLM(hf.LlamaConfig(**{**_SIZES, "num_hidden_layers": 1})))


def endless(model: Any) -> Any:
    """The model in evaluation, generating until it is told to stop."""
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model

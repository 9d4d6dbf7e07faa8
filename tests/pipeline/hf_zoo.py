"""Twelve tiny architectures of Hugging Face in training mode, with padding masks and targets."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from pipeline_zoo import calm
from torch import Tensor, nn
from torch.nn import functional as F

WIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ROTARY = WIDE | {"num_key_value_heads": 1, "head_dim": 8}
# The class, and what its configuration changes.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", WIDE | {"embedding_size": 8}),
    "bert": ("BertForMaskedLM", WIDE),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
    "electra": ("ElectraForMaskedLM", WIDE | {"embedding_size": 8}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", WIDE),
    "llama": ("LlamaForCausalLM", ROTARY),
    "mistral": ("MistralForCausalLM", ROTARY),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"word_embed_proj_dim": 16, "max_position_embeddings": 32},
    ),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in ROTARY.items() if k != "head_dim"}),
    "roberta": ("RobertaForMaskedLM", WIDE),
}
NAMES = sorted(CONFIGS)
BATCH, LENGTH, VOCABULARY = 8, 10, 48


def make(name: str) -> tuple[nn.Module, dict[str, Any], Tensor]:
    """A model in training mode without dropout, a call of it, and its target."""
    import transformers

    kind, changes = CONFIGS[name]
    made = getattr(transformers, kind)
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    torch.manual_seed(0)
    model = calm(made(made.config_class(vocab_size=VOCABULARY, **special, **changes)))
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for row, keep in enumerate((10, 4, 7, 10, 9, 3, 10, 6)):
        mask[row, keep:] = 0
    ids = torch.where(mask.bool(), ids, 1)
    target = torch.where(mask.bool(), torch.randint(0, VOCABULARY, (BATCH, LENGTH)), -100)
    call: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if "CausalLM" in kind or "LMHead" in kind:
        call["use_cache"] = False
    return model.train(), call, target


def loss_of(answer: Any, target: Tensor) -> Tensor:
    """Cross entropy of the tokens that are there."""
    return F.cross_entropy(answer.logits.flatten(0, 1).float(), target.flatten())


def weight_of(target: Tensor) -> Tensor:
    """How many tokens the loss of a micro-batch averages over."""
    return (target != -100).sum()


def parts(call: dict[str, Any], target: Tensor, count: int) -> list[tuple[dict[str, Any], Tensor]]:
    """The micro-batches of a call."""
    split = {k: v.chunk(count) if isinstance(v, Tensor) else [v] * count for k, v in call.items()}
    return [({k: v[i] for k, v in split.items()}, t) for i, t in enumerate(target.chunk(count))]


def plain_step(
    model: nn.Module, call: dict[str, Any], target: Tensor, count: int, autocast: bool
) -> tuple[Tensor, Tensor]:
    """The loss and the logits of the plain model; gradients are accumulated over micro-batches."""
    total, losses, answers = weight_of(target), [], []
    for part, aim in parts(call, target, count):
        # With its cache autocast casts a weight that layers share (ALBERT) once, and adds up its gradients in
        # bfloat16; stages cast it in each place, and add in float32.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            answer = model(**part)
            loss = loss_of(answer, aim) * weight_of(aim) / total
        loss.backward()
        losses.append(loss.detach())
        answers.append(answer.logits.detach())
    return torch.stack(losses).sum(), torch.cat(answers)


def error(got: Tensor, want: Tensor, least: float = 1e-6) -> float:
    """The largest difference as a part of the largest value, or of `least` where that is more."""
    got, want = got.detach().float(), want.detach().float()
    scale = float(want.abs().max())
    return float((got - want).abs().max()) / max(scale, least)

"""Language models of Hugging Face, tiny and with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from tests.models.case import Call, Case

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 100}
_ENCODER = {
    **_IDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_DECODER = {**_ENCODER, "use_cache": False}
_GPT = {**_IDS, "use_cache": False, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BOTH = {
    **_IDS,
    "use_cache": False,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
_T5 = {**_IDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False}
_T5 |= {"decoder_start_token_id": 0}


def _ids(length: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 100, (batch, length))


def _mask(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1:, -3:] = 0
    return mask


def _text(name: str, kind: str, settings: dict[str, Any], mask: bool = False, length: int = 16) -> Case:
    config, model = f"{name}Config", f"{name}{kind}"

    def make() -> Call:
        made = getattr(hf, model)(getattr(hf, config)(**settings))
        ids = _ids(length)
        return Call(made, (), {"input_ids": ids, **({"attention_mask": _mask(ids)} if mask else {})})

    return Case(model, "Hugging Face", make)


def _to_text(name: str, kind: str, settings: dict[str, Any]) -> Case:
    config, model = f"{name}Config", f"{name}{kind}"

    def make() -> Call:
        made = getattr(hf, model)(getattr(hf, config)(**settings))
        ids = _ids()
        kwargs = {"input_ids": ids, "attention_mask": _mask(ids), "decoder_input_ids": _ids(8)}
        return Call(made, (), kwargs)

    return Case(model, "Hugging Face", make)


def _boxes() -> torch.Tensor:
    corner, size = torch.randint(0, 400, (2, 16, 2)), torch.randint(1, 400, (2, 16, 2))
    return torch.cat([corner, corner + size], -1)


def _layout() -> Call:
    model = hf.LayoutLMModel(hf.LayoutLMConfig(**_ENCODER))
    return Call(model, (), {"input_ids": _ids(), "bbox": _boxes()})


def _luke() -> Call:
    config = hf.LukeConfig(**_ENCODER, entity_vocab_size=20, entity_emb_size=16)
    kwargs = {
        "input_ids": _ids(),
        "entity_ids": torch.randint(1, 20, (2, 3)),
        "entity_position_ids": torch.randint(0, 16, (2, 3, 30)),
    }
    return Call(hf.LukeModel(config), (), kwargs)


def _perceiver() -> Call:
    config = hf.PerceiverConfig(
        vocab_size=100,
        d_model=32,
        d_latents=32,
        num_latents=8,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        max_position_embeddings=16,
    )
    return Call(hf.PerceiverForMaskedLM(config), (_ids(),))


def _canine() -> Call:
    config = hf.CanineConfig(**{**_ENCODER, "local_transformer_stride": 16, "num_hash_buckets": 64})
    return Call(hf.CanineModel(config), (_ids(64),))


def _with_cache() -> Call:
    """A decoder that answers with its cache of keys and values."""
    model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**_ENCODER, "num_key_value_heads": 2}))
    return Call(model, (), {"input_ids": _ids(), "use_cache": True})


_GROUPED = {**_DECODER, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}

CASES = [
    _text("Qwen2", "ForCausalLM", _GROUPED, mask=True),
    _text("Qwen3", "ForCausalLM", _GROUPED),
    Case("Qwen2ForCausalLM with its cache", "Hugging Face", _with_cache),
    _text("Gemma", "ForCausalLM", _GROUPED),
    _text("Gemma2", "ForCausalLM", _GROUPED),
    _text("Mistral", "ForCausalLM", _GROUPED, mask=True),
    _text("Mixtral", "ForCausalLM", _EXPERTS),
    _text("Phi", "ForCausalLM", _DECODER),
    _text("Phi3", "ForCausalLM", _GROUPED),
    _text("StableLm", "ForCausalLM", _GROUPED),
    _text("Olmo", "ForCausalLM", _GROUPED),
    _text("Cohere", "ForCausalLM", _GROUPED),
    _text("Granite", "ForCausalLM", _GROUPED),
    _text("Nemotron", "ForCausalLM", _GROUPED),
    _text("Starcoder2", "ForCausalLM", _GROUPED),
    _text("Persimmon", "ForCausalLM", _DECODER),
    _text("Bloom", "ForCausalLM", {**_IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
    _text("OPT", "ForCausalLM", {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, mask=True),
    _text("GPTNeoX", "ForCausalLM", _DECODER),
    _text(
        "GPTNeo",
        "ForCausalLM",
        {**_IDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]], "use_cache": False},
    ),
    _text("GPTJ", "ForCausalLM", {**_GPT, "rotary_dim": 4}),
    _text("CodeGen", "ForCausalLM", {**_GPT, "rotary_dim": 4}),
    _text("Falcon", "ForCausalLM", {**_DECODER, "new_decoder_architecture": False, "alibi": False}),
    _text(
        "Mpt",
        "ForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 100}
        | {"max_seq_len": 64, "use_cache": False},
    ),
    _text("OpenAIGPT", "LMHeadModel", _GPT),
    _text("CTRL", "LMHeadModel", {**_GPT, "dff": 64}),
    _text("Mamba", "ForCausalLM", {**_DECODER, "state_size": 4}),
    _text(
        "Mamba2",
        "ForCausalLM",
        {**_DECODER, "state_size": 4, "num_heads": 8, "head_dim": 8} | {"n_groups": 1, "chunk_size": 8},
    ),
    _text("Rwkv", "ForCausalLM", {**_DECODER, "attention_hidden_size": 32, "context_length": 64}),
    _text(
        "RecurrentGemma",
        "ForCausalLM",
        {**_GROUPED, "num_hidden_layers": 3, "lru_width": 32} | {"attention_window_size": 16},
    ),
    _text("Deberta", "Model", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, True),
    _text(
        "DebertaV2", "Model", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, True
    ),
    _text("Electra", "Model", {**_ENCODER, "embedding_size": 16}, mask=True),
    _text("Albert", "Model", {**_ENCODER, "embedding_size": 16}, mask=True),
    _text("Roberta", "ForSequenceClassification", _ENCODER, mask=True),
    _text("XLMRoberta", "ForTokenClassification", _ENCODER, mask=True),
    _text("Camembert", "ForQuestionAnswering", _ENCODER, mask=True),
    _text("XLNet", "Model", {**_IDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, mask=True),
    _text("XLM", "Model", {**_IDS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 100}),
    _text("Flaubert", "Model", {**_IDS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 100}),
    _text("Longformer", "Model", {**_ENCODER, "attention_window": 8}, mask=True),
    _text("BigBird", "Model", {**_ENCODER, "attention_type": "original_full"}, mask=True),
    _text("FNet", "Model", _ENCODER),
    _text(
        "Funnel",
        "Model",
        {**_IDS, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32}
        | {"n_head": 4, "d_head": 8, "d_inner": 64},
        mask=True,
    ),
    _text("MPNet", "Model", _ENCODER, mask=True),
    _text("MobileBert", "Model", {**_ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16}, mask=True),
    _text("SqueezeBert", "Model", {**_ENCODER, "embedding_size": 32}, mask=True),
    _text("RoFormer", "Model", {**_ENCODER, "embedding_size": 32}, mask=True),
    _text("ConvBert", "Model", {**_ENCODER, "embedding_size": 32}, mask=True),
    _text("Splinter", "Model", _ENCODER, mask=True),
    _text("Nystromformer", "Model", {**_ENCODER, "num_landmarks": 4, "segment_means_seq_len": 16}),
    _text("Yoso", "Model", {**_ENCODER, "use_expectation": True}),
    _text("Ernie", "Model", _ENCODER, mask=True),
    _text("ModernBert", "Model", {**_ENCODER, "cls_token_id": 1, "sep_token_id": 2}, mask=True),
    _text("RemBert", "Model", {**_ENCODER, "input_embedding_size": 16}, mask=True),
    _text("MegatronBert", "Model", _ENCODER, mask=True),
    _text("IBert", "Model", _ENCODER, mask=True),
    _text("Esm", "Model", {**_ENCODER, "mask_token_id": 3, "position_embedding_type": "rotary"}, mask=True),
    _text("Data2VecText", "Model", _ENCODER, mask=True),
    _text("Tapas", "Model", {**_ENCODER, "type_vocab_sizes": [3, 10, 10, 2, 10, 10, 10]}),
    Case("CanineModel", "Hugging Face", _canine),
    Case("LayoutLMModel", "Hugging Face", _layout),
    Case("LukeModel", "Hugging Face", _luke),
    Case("PerceiverForMaskedLM", "Hugging Face", _perceiver),
    _to_text("T5", "ForConditionalGeneration", _T5),
    _to_text("MT5", "ForConditionalGeneration", _T5),
    _to_text("LongT5", "ForConditionalGeneration", {**_T5, "local_radius": 4}),
    _to_text("Bart", "ForConditionalGeneration", _BOTH),
    _to_text("MBart", "ForConditionalGeneration", _BOTH),
    _to_text("Pegasus", "ForConditionalGeneration", _BOTH),
    _to_text("Marian", "MTModel", {**_BOTH, "decoder_vocab_size": 100}),
    _to_text("M2M100", "ForConditionalGeneration", _BOTH),
    _to_text("Blenderbot", "ForConditionalGeneration", _BOTH),
    _to_text(
        "LED",
        "ForConditionalGeneration",
        {**_BOTH, "attention_window": 8}
        | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    _to_text(
        "ProphetNet",
        "ForConditionalGeneration",
        {**_IDS, "hidden_size": 32, "use_cache": False}
        | {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 4}
        | {"num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"max_position_embeddings": 64, "ngram": 2, "decoder_start_token_id": 1},
    ),
]

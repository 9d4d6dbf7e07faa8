"""Vision, audio, time-series and mixed models of Hugging Face, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tests.models.case import Call, Case

_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_SPEECH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2}
_SERIES |= {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
_SERIES |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
_DETR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 8,
}


def _image(side: int = 32) -> torch.Tensor:
    return torch.randn(1, 3, side, side)


def _vision(name: str, kind: str, settings: dict[str, Any], side: int = 32) -> Case:
    config, model = f"{name}Config", f"{name}{kind}"

    def make() -> Call:
        made = getattr(hf, model)(getattr(hf, config)(**settings))
        return Call(made, (), {"pixel_values": _image(side)})

    return Case(model, "Hugging Face", make)


def _speech(name: str, kind: str, settings: dict[str, Any]) -> Case:
    config, model = f"{name}Config", f"{name}{kind}"

    def make() -> Call:
        made = getattr(hf, model)(getattr(hf, config)(**settings))
        return Call(made, (), {"input_values": torch.randn(1, 800)})

    return Case(model, "Hugging Face", make)


def _backbone() -> Any:
    return hf.ResNetConfig(embedding_size=8, **_STAGES, out_features=["stage2", "stage3", "stage4"])


def _detector(name: str, **settings: Any) -> Case:
    def make() -> Call:
        config = getattr(hf, f"{name}Config")(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=_backbone(),
            **{**_DETR, **settings},
        )
        return Call(getattr(hf, f"{name}ForObjectDetection")(config), (), {"pixel_values": _image(64)})

    return Case(f"{name}ForObjectDetection", "Hugging Face", make)


def _series(name: str, **settings: Any) -> Case:
    def make() -> Call:
        config = getattr(hf, f"{name}Config")(**_SERIES, **settings)
        past = config.context_length + max(config.lags_sequence)
        kwargs = {
            "past_values": torch.rand(2, past),
            "past_time_features": torch.randn(2, past, 2),
            "past_observed_mask": torch.ones(2, past),
            "future_values": torch.rand(2, 4),
            "future_time_features": torch.randn(2, 4, 2),
        }
        return Call(getattr(hf, f"{name}Model")(config), (), kwargs)

    return Case(f"{name}Model", "Hugging Face", make)


def _patches(name: str, **settings: Any) -> Case:
    def make() -> Call:
        config = getattr(hf, f"{name}Config")(
            context_length=16, patch_length=4, patch_stride=4, num_input_channels=2, d_model=16, **settings
        )
        model = getattr(hf, f"{name}ForPrediction")(config)
        return Call(model, (), {"past_values": torch.randn(2, 16, 2)})

    return Case(f"{name}ForPrediction", "Hugging Face", make)


_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"vocab_size": 100, "max_position_embeddings": 32, "projection_dim": 32}


def _two_towers(name: str, **settings: Any) -> Callable[[], Call]:
    def make() -> Call:
        config = getattr(hf, f"{name}Config")(text_config=dict(_TEXT), vision_config=dict(_VIT), **settings)
        ids = torch.randint(3, 99, (2, 16))
        model = getattr(hf, f"{name}Model")(config)
        return Call(model, (), {"input_ids": ids, "pixel_values": _image().repeat(2, 1, 1, 1)})

    return make


def _whisper() -> Call:
    config = hf.WhisperConfig(
        **{k: v for k, v in _DETR.items() if k != "num_queries"},
        max_source_positions=20,
        max_target_positions=20,
        vocab_size=100,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    kwargs = {"input_features": torch.randn(1, 80, 40), "decoder_input_ids": torch.randint(3, 99, (1, 8))}
    return Call(hf.WhisperForConditionalGeneration(config), (), kwargs)


def _speech_to_text() -> Call:
    config = hf.Speech2TextConfig(
        **{k: v for k, v in _DETR.items() if k != "num_queries"},
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=64,
        max_target_positions=20,
        vocab_size=100,
        use_cache=False,
    )
    kwargs = {"input_features": torch.randn(1, 40, 8), "decoder_input_ids": torch.randint(3, 99, (1, 8))}
    return Call(hf.Speech2TextForConditionalGeneration(config), (), kwargs)


def _ast() -> Call:
    config = hf.ASTConfig(**{**_VIT, "num_mel_bins": 16, "max_length": 32, "patch_size": 8})
    config.frequency_stride = config.time_stride = 8
    return Call(hf.ASTModel(config), (), {"input_values": torch.randn(1, 32, 16)})


def _sam() -> Call:
    config = hf.SamVisionConfig(
        **{**_VIT, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64}
    )
    return Call(hf.SamVisionModel(config), (), {"pixel_values": _image()})


def _video(name: str, **settings: Any) -> Case:
    def make() -> Call:
        config = getattr(hf, f"{name}Config")(**{**_VIT, "num_frames": 2, **settings})
        return Call(getattr(hf, f"{name}Model")(config), (), {"pixel_values": torch.randn(1, 2, 3, 32, 32)})

    return Case(f"{name}Model", "Hugging Face", make)


def _vilt() -> Call:
    config = hf.ViltConfig(**{**_VIT, "vocab_size": 100, "max_position_embeddings": 32})
    kwargs = {"input_ids": torch.randint(3, 99, (1, 16)), "pixel_values": _image()}
    return Call(hf.ViltModel(config), (), kwargs)


def _encodec() -> Call:
    config = hf.EncodecConfig(
        num_filters=4, upsampling_ratios=[4, 2], hidden_size=16, codebook_size=16, codebook_dim=16
    )
    return Call(hf.EncodecModel(config), (torch.randn(1, 1, 320),))


def _segmenter() -> Call:
    config = hf.UperNetConfig(
        backbone_config=hf.ConvNextConfig(
            **_STAGES, out_features=["stage1", "stage2", "stage3", "stage4"], layer_scale_init_value=0.5
        ),
        hidden_size=16,
        auxiliary_in_channels=16,
        auxiliary_channels=8,
        num_labels=4,
    )
    return Call(hf.UperNetForSemanticSegmentation(config), (), {"pixel_values": _image(64)})


_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}

CASES = [
    _vision("Beit", "Model", {**_VIT, "use_relative_position_bias": True}),
    _vision("DeiT", "ForImageClassification", _VIT),
    _vision("Dinov2", "Model", _VIT),
    _vision("Data2VecVision", "Model", _VIT),
    _vision("ViTMSN", "Model", _VIT),
    _vision("ViTMAE", "Model", {**_VIT, "mask_ratio": 0.5}),
    _vision("Yolos", "ForObjectDetection", {**_VIT, "image_size": [32, 32], "num_detection_tokens": 4}),
    _vision("ConvNextV2", "Model", _STAGES, side=64),
    _vision("RegNet", "ForImageClassification", {**_STAGES, "embedding_size": 8, "groups_width": 8}, 64),
    _vision("Bit", "Model", {**_STAGES, "embedding_size": 8, "num_groups": 4}, 64),
    _vision("MobileNetV1", "Model", {"depth_multiplier": 0.25, "image_size": 64}, 64),
    _vision("MobileViTV2", "Model", {"image_size": 64, "width_multiplier": 0.25}, 64),
    _vision("PoolFormer", "Model", _STAGES, 64),
    _vision("Pvt", "Model", {**_STAGES, "image_size": 64, "num_attention_heads": [1, 2, 2, 4]}, 64),
    _vision("PvtV2", "Model", {**_STAGES, "image_size": 64, "num_attention_heads": [1, 2, 2, 4]}, 64),
    _vision("Swinv2", "Model", {**_SWIN, "window_size": 4}),
    _vision("FocalNet", "Model", {**_SWIN, "focal_levels": [2, 2], "focal_windows": [3, 3]}),
    _vision(
        "Hiera",
        "Model",
        {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1]} | {"num_heads": [1, 2, 4, 8]},
        64,
    ),
    _vision(
        "Levit",
        "Model",
        {"image_size": 64, "hidden_sizes": [16, 32, 48], "depths": [1, 1, 1]}
        | {"num_attention_heads": [2, 4, 6], "key_dim": [8, 8, 8]},
        64,
    ),
    _vision(
        "SwiftFormer", "Model", {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24, 32]}, 64
    ),
    _vision("TextNet", "Model", {}, 64),
    _vision(
        "GLPN",
        "ForDepthEstimation",
        {**_STAGES, "num_attention_heads": [1, 2, 2, 4]} | {"decoder_hidden_size": 8},
        64,
    ),
    _vision(
        "SuperPoint",
        "ForKeypointDetection",
        {"encoder_hidden_sizes": [8, 8, 16, 16]} | {"decoder_hidden_size": 16, "descriptor_decoder_dim": 16},
        64,
    ),
    Case("UperNetForSemanticSegmentation", "Hugging Face", _segmenter),
    Case("SamVisionModel", "Hugging Face", _sam),
    _detector("ConditionalDetr"),
    _detector("TableTransformer"),
    _detector(
        "DeformableDetr", decoder_layers=2, num_feature_levels=3, encoder_n_points=2, decoder_n_points=2
    ),
    _speech("Hubert", "Model", _SPEECH),
    _speech("UniSpeech", "Model", _SPEECH),
    _speech("UniSpeechSat", "Model", _SPEECH),
    _speech("WavLM", "Model", _SPEECH),
    _speech("SEW", "Model", {**_SPEECH, "squeeze_factor": 2}),
    _speech("SEWD", "Model", {**_SPEECH, "squeeze_factor": 2}),
    _speech("Data2VecAudio", "Model", {**_SPEECH, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}),
    _speech("Wav2Vec2Conformer", "ForCTC", _SPEECH),
    Case("WhisperForConditionalGeneration", "Hugging Face", _whisper),
    Case("Speech2TextForConditionalGeneration", "Hugging Face", _speech_to_text),
    Case("ASTModel", "Hugging Face", _ast),
    Case("EncodecModel", "Hugging Face", _encodec),
    _series("TimeSeriesTransformer"),
    _series("Autoformer", label_length=4),
    _series("Informer"),
    _patches("PatchTST", num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, prediction_length=4),
    _patches("PatchTSMixer", num_layers=1, prediction_length=4),
    _video("Timesformer"),
    _video("VideoMAE", tubelet_size=2),
    _video("Vivit", tubelet_size=[2, 8, 8]),
    Case("SiglipModel", "Hugging Face", _two_towers("Siglip")),
    Case("CLIPSegModel", "Hugging Face", _two_towers("CLIPSeg", projection_dim=32)),
    Case("OwlViTModel", "Hugging Face", _two_towers("OwlViT", projection_dim=32)),
    Case("BlipModel", "Hugging Face", _two_towers("Blip", projection_dim=32)),
    Case("ViltModel", "Hugging Face", _vilt),
]

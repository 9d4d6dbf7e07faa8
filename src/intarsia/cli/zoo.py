"""Real architectures with random weights, by name.

The configurations are Hugging Face's; nothing is downloaded. By default, models are small, with every
operator of the architecture. With `full`, they have the published size.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.errors import InputError


@dataclass(frozen=True)
class Specimen:
    """A model in evaluation mode, or an exported program, and an example call."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None

    @property
    def module(self) -> nn.Module:
        """The model as a module; for an exported program, its module."""
        model: nn.Module = self.model.module() if isinstance(self.model, ExportedProgram) else self.model
        return model

    def compile(self, **options: Any) -> Any:
        """The model, compiled for the example call."""
        from intarsia.compiler import compile

        return compile(self.model, self.args, self.kwargs, dynamic_shapes=self.dynamic_shapes, **options)

    def export_onnx(self, path: Path) -> None:
        """Write the file of `torch.onnx.export`."""
        torch.onnx.export(
            self.model,
            self.args,
            path,
            kwargs=self.kwargs,
            dynamo=True,
            dynamic_shapes=self.dynamic_shapes,
            verbose=False,
        )

    def repeated(self, times: int) -> Specimen:
        """The model with a batch of `times` copies of its example.

        >>> specimen("resnet50").repeated(3).args[0].shape
        torch.Size([3, 3, 64, 64])
        """

        def stacked(value: object) -> object:
            if not isinstance(value, torch.Tensor) or not value.ndim:
                return value
            return value.repeat(times, *[1] * (value.ndim - 1))

        args, kwargs = pytree.tree_map(stacked, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs) if times > 1 else self

    def padded(self, rows: int, *, varying: bool = False) -> Specimen:
        """The model with a batch of `rows` and a mask. Every row has more padding than the one before; a
        single row has a quarter. With `varying`, batch and length are dynamic, up to 4 times as large.

        >>> specimen("bert").padded(2).kwargs["attention_mask"].sum(1).tolist()
        [16, 10]
        """
        ids = self.args[0] if self.args else self.kwargs.get("input_ids")
        takes = inspect.signature(self.module.forward).parameters
        if "attention_mask" not in takes or not isinstance(ids, torch.Tensor) or ids.is_floating_point():
            raise InputError(f"{type(self.model).__name__} does not take tokens with an attention_mask")
        length = ids.shape[1]
        lengths = length - torch.arange(rows) * (3 * length // 4) // max(rows, 2)
        lengths = lengths if rows > 1 else lengths - length // 4
        mask = (torch.arange(length) < lengths[:, None]).to(torch.long)
        ids = ids[:1].expand(rows, length).contiguous()
        sizes = None
        if varying:
            axes = {0: Dim("batch", min=1, max=4 * rows), 1: Dim("length", min=2, max=4 * length)}
            sizes = {next(iter(takes)): axes, "attention_mask": axes}
        return Specimen(self.model, (ids,), {"attention_mask": mask}, sizes)

    def shortened(self, part: int) -> Specimen:
        """A `padded` specimen with an example of its first tokens only: a half, a third or another part."""
        (ids,), mask = self.args, self.kwargs["attention_mask"]
        length = max(ids.shape[1] // part, 2)
        return replace(self, args=(ids[:, :length],), kwargs={"attention_mask": mask[:, :length]})


def names() -> list[str]:
    """The names of the architectures, in order."""
    return list(_MAKERS)


def specimen(name: str, *, full: bool = False) -> Specimen:
    """An architecture by name, always with the same weights and inputs.

    >>> specimen("bert").kwargs["attention_mask"].shape
    torch.Size([2, 16])
    """
    if name not in _MAKERS:
        raise InputError(f"there is no architecture {name!r}; the architectures are {', '.join(_MAKERS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations need no download
    try:
        import transformers
    except ImportError as error:
        raise InputError("the architectures need transformers: pip install 'intarsia[generation]'") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = _MAKERS[name](transformers, full)
    result.model.eval()
    return result


_Maker = Callable[[Any, bool], Specimen]
_MAKERS: dict[str, _Maker] = {}


def _maker(function: _Maker) -> _Maker:
    _MAKERS[function.__name__.removeprefix("_")] = function
    return function


def _tokens(full: bool, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, 128) if full else (2, 16))


def _image(full: bool, small: int = 64, large: int = 224) -> torch.Tensor:
    side = large if full else small
    return torch.randn(1, 3, side, side)


@_maker
def _bert(hf: Any, full: bool) -> Specimen:
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.BertConfig(**({} if full else {**tiny, "vocab_size": 100}))
    ids = _tokens(full, config.vocab_size)
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    return Specimen(hf.BertModel(config), (ids,), {"attention_mask": mask})


@_maker
def _distilbert(hf: Any, full: bool) -> Specimen:
    tiny = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 100}
    config = hf.DistilBertConfig(**({} if full else tiny))
    return Specimen(hf.DistilBertModel(config), (_tokens(full, config.vocab_size),))


@_maker
def _gpt2(hf: Any, full: bool) -> Specimen:
    tiny = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    config = hf.GPT2Config(use_cache=False, **({} if full else tiny))
    return Specimen(hf.GPT2LMHeadModel(config), (_tokens(full, config.vocab_size),))


@_maker
def _llama(hf: Any, full: bool) -> Specimen:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    large = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 32000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if full:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = hf.LlamaConfig(
        use_cache=False, max_position_embeddings=256, **heads, **(large if full else small)
    )
    return Specimen(hf.LlamaForCausalLM(config), (_tokens(full, config.vocab_size),))


@_maker
def _t5_encoder(hf: Any, full: bool) -> Specimen:
    tiny = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    config = hf.T5Config(use_cache=False, **({} if full else tiny))
    return Specimen(hf.T5EncoderModel(config), (_tokens(full, config.vocab_size),))


@_maker
def _vit(hf: Any, full: bool) -> Specimen:
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.ViTConfig(**({} if full else {**tiny, "image_size": 64}))
    return Specimen(hf.ViTModel(config), (_image(full),))


@_maker
def _swin(hf: Any, full: bool) -> Specimen:
    tiny = {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    config = hf.SwinConfig(**({} if full else tiny))
    return Specimen(hf.SwinModel(config), (_image(full),))


@_maker
def _resnet50(hf: Any, full: bool) -> Specimen:
    tiny = {"embedding_size": 8, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 2, 1, 1]}
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**({} if full else tiny)))
    _lively_statistics(model)
    return Specimen(model, (_image(full),))


@_maker
def _convnext(hf: Any, full: bool) -> Specimen:
    tiny = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
    # The published layer scale of 1e-6 would hide the blocks in the residual.
    config = hf.ConvNextConfig(layer_scale_init_value=0.5, **({} if full else tiny))
    return Specimen(hf.ConvNextModel(config), (_image(full),))


@_maker
def _mobilenet_v2(hf: Any, full: bool) -> Specimen:
    tiny = {"depth_multiplier": 0.25, "image_size": 64}
    model = hf.MobileNetV2Model(hf.MobileNetV2Config(**({} if full else tiny)))
    _lively_statistics(model)
    return Specimen(model, (_image(full),))


@_maker
def _efficientnet(hf: Any, full: bool) -> Specimen:
    if full:  # B0
        config = hf.EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280
        )
    else:
        config = hf.EfficientNetConfig(
            width_coefficient=0.25, depth_coefficient=0.4, image_size=64, hidden_dim=320
        )
    model = hf.EfficientNetModel(config)
    _lively_statistics(model)
    return Specimen(model, (_image(full),))


@_maker
def _segformer(hf: Any, full: bool) -> Specimen:
    tiny = {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 16, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 32,
    }
    model = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**({} if full else tiny)))
    _lively_statistics(model)
    return Specimen(model, (_image(full, 64, 256),))


@_maker
def _mobilevit(hf: Any, full: bool) -> Specimen:
    tiny = {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 64]}
    model = hf.MobileViTModel(hf.MobileViTConfig(**({} if full else tiny)))
    _lively_statistics(model)
    return Specimen(model, (_image(full, 64, 256),))


@_maker
def _whisper_encoder(hf: Any, full: bool) -> Specimen:
    tiny = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "max_source_positions": 50,
        "vocab_size": 100,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    config = hf.WhisperConfig(**({} if full else tiny))
    frames = 2 * config.max_source_positions
    return Specimen(hf.WhisperModel(config).get_encoder(), (torch.randn(1, config.num_mel_bins, frames),))


@_maker
def _wav2vec2(hf: Any, full: bool) -> Specimen:
    tiny = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "conv_dim": (16, 16, 16),
        "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    config = hf.Wav2Vec2Config(**({"num_hidden_layers": 4} if full else tiny))
    return Specimen(hf.Wav2Vec2Model(config), (torch.randn(1, 16000 if full else 800),))


@_maker
def _clip(hf: Any, full: bool) -> Specimen:
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**text, "image_size": 64, "patch_size": 16}
    tiny = {
        "text_config": {**text, "vocab_size": 100, "max_position_embeddings": 32},
        "vision_config": vision,
        "projection_dim": 32,
    }
    config = hf.CLIPConfig(**({} if full else tiny))
    ids = torch.randint(3, config.text_config.vocab_size, (2, 16))
    pixels = _image(full)
    return Specimen(hf.CLIPModel(config), (), {"input_ids": ids, "pixel_values": pixels})


@_maker
def _detr(hf: Any, full: bool) -> Specimen:
    backbone = hf.ResNetConfig(
        out_features=["stage4"],
        **({} if full else {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}),
    )
    tiny = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_queries": 8,
    }
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        **({} if full else tiny),
    )
    model = hf.DetrForObjectDetection(config)
    _lively_statistics(model)
    return Specimen(model, (_image(full, 64, 320),))


def _lively_statistics(model: nn.Module) -> None:
    """Set running statistics like those of a trained model: initial ones would hide a wrong batch norm."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)

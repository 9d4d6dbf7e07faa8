"""Models from Hugging Face folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from intarsia.checkpoint.layouts import UnknownLayout, scheme_of
from intarsia.errors import InputError, first_line


def load_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """The transformers model of a Hugging Face folder, with weights as packed as in its files.

    Folders whose config.json has a `quantization_config` of compressed-tensors (`pack-quantized`,
    `int-quantized`, `float-quantized`, `naive-quantized`), AWQ (`gemm`) or GPTQ (either version, with or
    without act-order) need no other package. Their linear layers keep the packed tensors as buffers, under
    the names of the checkpoint, and compute with the weights that these stand for. transformers loads all
    other folders, with the package that their `quantization_config` needs.

    Args:
        folder: has config.json and the weights, in one file or several. Nothing is downloaded.
        dtype: of all floating-point tensors, scales included, and of the computation; by default the one of
            config.json. Few processors are fast in float16: there, pass `torch.float32`.

    Returns:
        The model, in evaluation mode, of the class that config.json names.

    Raises:
        InputError: a tensor is missing, or does not have the shape or dtype of its layout; or transformers
            cannot load the folder.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> folder = tempfile.mkdtemp()
    >>> LlamaForCausalLM(config).save_pretrained(folder)
    >>> type(load_pretrained(folder)).__name__
    'LlamaForCausalLM'
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json, so it is not a Hugging Face folder")
    hf = transformers_for(str(folder))
    loaded = {} if dtype is None else {"dtype": dtype}
    try:
        config = hf.AutoConfig.from_pretrained(folder)
        settings = getattr(config, "quantization_config", None)
        if settings is None:
            return class_of(hf, config).from_pretrained(folder, **loaded).eval()
        try:
            return _quantized(hf, folder, config, settings, loaded)
        except UnknownLayout as reason:
            return _by_its_own_package(hf, folder, reason, loaded)
    except InputError:
        raise
    except Exception as error:  # transformers raises many kinds here
        raise InputError(f"transformers cannot load {folder}: {first_line(error)}") from error


def _quantized(hf: Any, folder: Path, config: Any, settings: dict[str, Any], loaded: dict[str, Any]) -> Any:
    """The model with Intarsia's quantized layers, into which transformers loads the files.

    Also where the package of the layout is installed: compressed-tensors 0.20 makes all weights dense at the
    first call, and kernels of other packages are seen by no graph.
    """
    scheme_of(settings)
    from intarsia.checkpoint.quantizer import METHOD

    config.quantization_config = {"quant_method": METHOD, "checkpoint": settings}
    return _complete(hf, folder, config, loaded)


def _by_its_own_package(hf: Any, folder: Path, reason: UnknownLayout, loaded: dict[str, Any]) -> Any:
    """The model as loaded by the package that wrote the checkpoint, if it is installed."""
    try:
        return _complete(hf, folder, hf.AutoConfig.from_pretrained(folder), loaded)
    except Exception as error:  # transformers raises many kinds here
        raise InputError(f"{reason}, and transformers cannot load {folder}: {first_line(error)}") from error


def _complete(hf: Any, folder: Path, config: Any, loaded: dict[str, Any]) -> Any:
    """The model; InputError if a weight is not in the files.

    transformers 5.22 draws what files lack, such as all weights of a `quant_method` that it does not know.
    """
    kind = class_of(hf, config)
    model, report = kind.from_pretrained(folder, config=config, output_loading_info=True, **loaded)
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{folder} has no tensor {missing[0]}, which {type(model).__name__} needs")
    modules = dict(model.named_modules())
    # Tensors of modules that the model does not have, such as heads for speculation, are ignored.
    if others := sorted(key for key in report["unexpected_keys"] if key.rpartition(".")[0] in modules):
        raise InputError(f"{folder} has a tensor {others[0]}, which {type(model).__name__} does not take")
    return model.eval()


def transformers_for(name: str) -> Any:
    """The package transformers, set to download nothing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{name} needs transformers: pip install 'intarsia[generation]'") from error
    return transformers


def class_of(hf: Any, config: Any) -> Any:
    """The model class that a configuration names."""
    named = next(iter(config.architectures or ()), "")
    return getattr(hf, named, None) or hf.AutoModel

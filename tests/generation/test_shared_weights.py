"""Programs for prompts and tokens of a quantized decoder read one packed copy of its weights."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.generation.families import endless
from tests.layouts import Compressed
from torch import nn

import intarsia
from intarsia import generation

IDS = torch.tensor([[1, 5, 9, 7]])
needs_maps = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="what a process maps is read from /proc"
)


def quantized() -> Any:
    """A Llama of one layer, whose seven products and head have weights in 4 bits."""
    torch.manual_seed(0)
    size = 512
    sizes = {"hidden_size": size, "intermediate_size": size, "vocab_size": size}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=8))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, Compressed(size, size, 128, 4))
    return endless(model)


def generated(model: Any) -> torch.Tensor:
    result: torch.Tensor = model.generate(IDS, do_sample=False, max_new_tokens=6)
    return result


def mappings() -> list[str]:
    """What this process maps of files of packed weights."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "intarsia_weights_" in line]


def mapped() -> Counter[str]:
    """How often it maps each file, by the file's number."""
    return Counter(line.split()[4] for line in mappings())


@needs_maps
def test_prompts_and_tokens_map_the_same_files() -> None:
    model = quantized()
    expected = generated(model)
    before = mapped()
    with intarsia.compile_generation(model, max_length=16, padding=False, engines="onnxruntime") as made:
        files = mapped() - before
        assert len(files) == 8  # one for each weight
        assert min(files.values()) >= 2  # in the session for prompts and in that for tokens
        assert torch.equal(generated(model), expected)
        assert made.forward.runs["own"] == 0
        assert all(line.endswith("(deleted)") for line in mappings())  # only what is mapped remains


@needs_maps
def test_programs_that_are_loaded_map_the_same_files(tmp_path: Path) -> None:
    model = quantized()
    expected = generated(model)
    with intarsia.compile_generation(model, max_length=16, padding=False, engines="onnxruntime") as made:
        generation.save(made, tmp_path / "file")
    del made
    gc.collect()
    before = mapped()
    with generation.load(tmp_path / "file", model) as loaded:
        files = mapped() - before
        assert len(files) == 8
        assert min(files.values()) >= 2
        assert torch.equal(generated(model), expected)
        assert loaded.forward.runs["own"] == 0
        assert not loaded.notes


def test_without_a_folder_for_temporary_files_each_program_holds_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/there_is_no_such_folder")
    model = quantized()
    expected = generated(model)
    with intarsia.compile_generation(model, max_length=16, padding=False, engines="onnxruntime") as made:
        assert torch.equal(generated(model), expected)
        assert made.forward.runs["own"] == 0
        assert [n for n in made.notes if n.startswith("programs do not share packed weights: [Errno 2]")]

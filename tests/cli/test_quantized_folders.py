"""Folders of Hugging Face with packed weights, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.command import Command
from tests.quantized_checkpoints import LAYOUTS, llama, write

from intarsia.checkpoint import load_pretrained
from intarsia.cli.model import compiled_file


@pytest.mark.slow
def test_a_folder_with_packed_weights(intarsia: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "awq"
    write(folder, llama(num_hidden_layers=1).half(), LAYOUTS["awq"])
    engine = ["--engines=onnxruntime", "--dtype=float32"]
    assert "onnxruntime" in intarsia.good("explain", folder, *engine)
    intarsia.good("compile", folder, *engine, "-o", tmp_path / "awq.intarsia")
    assert "computes what the model does" in intarsia.good("check", folder, *engine)
    compiled = compiled_file(str(tmp_path / "awq.intarsia"))
    ids = torch.arange(32)[None]
    assert compiled is not None
    reference = load_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        answer = compiled(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        torch.testing.assert_close(answer, reference(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_folder_with_packed_weights_that_do_not_fit(intarsia: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write(tmp_path, llama(num_hidden_layers=1), LAYOUTS["awq"])
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 16'))
    refused = intarsia("explain", tmp_path)
    assert refused.code != 0
    needed = "a layer of 64 inputs, 64 outputs, 4 bits in groups of 16 needs"
    assert "q_proj.scales is float16 [2, 64]" in refused.err and needed in refused.err
    assert "Traceback" not in refused.err


def test_a_dtype_that_does_not_fit(intarsia: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused = intarsia("explain", tmp_path, "--dtype=float8")
    assert refused.code != 0 and "--dtype float8 is none of float32, float16, bfloat16" in refused.err
    refused = intarsia("explain", "bert", "--dtype=float16")
    assert refused.code != 0 and "only for Hugging Face folders, and bert is not one" in refused.err

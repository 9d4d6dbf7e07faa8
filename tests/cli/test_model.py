"""What MODEL may be: a function, a program, an archive, a Hugging Face folder or type, a zoo name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.cli.command import Command
from tests.quantized_checkpoints import LAYOUTS, llama, write
from torch import nn

import intarsia
from intarsia.checkpoint import load_pretrained
from intarsia.cli.model import compiled_file, resolve
from intarsia.cli.zoo import Specimen


def _answer(specimen: Specimen) -> torch.Tensor:
    with torch.no_grad():
        answer = specimen.module(*specimen.args, **specimen.kwargs)
    return answer if isinstance(answer, torch.Tensor) else answer[0]


def test_a_function_of_a_file_or_a_module(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "models", raising=False)
    from_file = resolve(f"{models}:make")
    assert _answer(from_file).shape == (2, 3) and not from_file.model.training
    monkeypatch.delitem(sys.modules, "models", raising=False)
    torch.testing.assert_close(_answer(resolve("models:make")), _answer(from_file))


def test_a_program(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    specimen = resolve(str(tmp_path / "model.pt2"))
    torch.testing.assert_close(_answer(specimen), model(x))
    fast = intarsia.compile(specimen.model, specimen.args, specimen.kwargs)
    torch.testing.assert_close(fast(x), model(x))


def test_an_archive(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.linear(x) * scale}

    path = tmp_path / "two.intarsia"
    intarsia.save(intarsia.compile(Two().eval(), (torch.randn(2, 4),), {"scale": torch.ones(1)}), path)
    specimen = resolve(str(path))
    loaded = compiled_file(str(path))
    assert loaded is not None and specimen.args[0].shape == (2, 4) and list(specimen.kwargs) == ["scale"]
    with torch.no_grad():
        answer = specimen.module(*specimen.args, **specimen.kwargs)
    torch.testing.assert_close(loaded(*specimen.args, **specimen.kwargs), answer)


def test_a_folder_and_a_type_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    saved = transformers.BertForSequenceClassification(config).eval()
    saved.save_pretrained(tmp_path)
    specimen = resolve(str(tmp_path))
    assert type(specimen.model).__name__ == "BertForSequenceClassification"
    with torch.no_grad():
        torch.testing.assert_close(_answer(specimen), saved(**specimen.kwargs).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "beit", "bart", "hubert"])
def test_a_type_of_hugging_face(name: str) -> None:
    specimen = resolve(name)
    assert specimen.model.config.model_type == name
    assert torch.isfinite(_answer(specimen)).all()


def test_a_name_of_the_zoo() -> None:
    assert type(resolve("vit").model).__name__ == "ViTModel"


# Folders of Hugging Face with packed weights, on the command line.


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

"""What MODEL may be: a function, a program, an archive, a Hugging Face folder or type, a zoo name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia
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

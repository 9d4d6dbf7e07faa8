"""Programs of generation as one file, loaded into a model of the same weights."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.generation import readers
from tests.generation.families import smallest

import intarsia
from intarsia import generation
from intarsia.errors import ArchiveError, InputError

pytestmark = pytest.mark.slow

ROOM = 24


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.Tensor]]:
    """A file of programs, and what the model they were made of generates."""
    path = tmp_path_factory.mktemp("saved") / "llama.generation"
    model = smallest()
    with intarsia.compile_generation(model, max_length=ROOM, batch=(1, 2), engines="onnxruntime") as made:
        generation.save(made, path)
    yield path, tokens(model)
    with pytest.raises(ArchiveError, match="LlamaForCausalLM was restored; there is nothing to save"):
        generation.save(made, path)


@contextmanager
def safetensors_of(path: Path) -> Iterator[Any]:
    """The weights of a file, as the library reads them."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        yield safe_open(archive.extract("weights.safetensors", folder), "pt")


def tokens(model: Any, rows: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 128, (rows, 9), generator=torch.Generator().manual_seed(1))
    made: torch.Tensor = model.generate(ids, max_new_tokens=8, do_sample=False)
    return made


def test_weights_stand_in_the_file_once(saved: tuple[Path, torch.Tensor]) -> None:
    """Four programs of one model, two of a prompt and two of a token, share its weights."""
    with safetensors_of(saved[0]) as weights:
        stored = sum(weights.get_tensor(name).nbytes for name in weights.keys())  # noqa: SIM118
    assert stored < 1.2 * sum(tensor.nbytes for tensor in smallest().state_dict().values())


def test_a_model_of_the_same_weights_generates_by_the_file(saved: tuple[Path, torch.Tensor]) -> None:
    path, expected = saved
    model = smallest()
    with generation.load(path, model) as made:
        assert "batch 2, token: on onnxruntime" in str(made)
        before = dict(made.forward.runs)
        assert torch.equal(tokens(model), expected)
        assert made.forward.runs["token"] == before["token"] + 7 and made.forward.runs["own"] == 0
    assert "forward" not in model.__dict__


def test_a_weight_that_is_written_to_is_seen(saved: tuple[Path, torch.Tensor]) -> None:
    model = smallest()
    with generation.load(saved[0], model):
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        with pytest.warns(UserWarning, match=r"lm_head\.weight was written to"):
            found = tokens(model)
    assert torch.equal(found, tokens(model))


def _other_weight(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


def _other_angles(model: Any) -> None:
    model.model.rotary_emb.inv_freq[1] *= 1.1  # a buffer that no state dict has


def _other_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 3.0  # a number that is no weight


def _other_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_other_weight, "other weights than when it was saved: lm_head.weight differs"),
        (_other_angles, "other weights than when it was saved: model.rotary_emb.inv_freq differs"),
        (_other_epsilon, "by the programs of the file, is off by"),
        (_other_attention, "mask_dtype torch.float32.* and was .*mask_dtype torch.bool"),
        (lambda model: model.train(), "is in training; call eval"),
    ],
)
def test_another_model_is_refused(saved: tuple[Path, torch.Tensor], change: Any, told: str) -> None:
    model = smallest()
    change(model)
    with pytest.raises(ArchiveError, match=told):
        generation.load(saved[0], model)
    assert "forward" not in model.__dict__


def test_what_is_no_model_is_refused(saved: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(InputError, match="were made of, not a str"):
        generation.load(saved[0], "llama")  # type: ignore[arg-type]


def test_a_damaged_file_is_refused(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    damaged = bytearray(saved[0].read_bytes())
    damaged[damaged.index(smallest().lm_head.weight.detach().numpy().tobytes()) + 99] ^= 1
    (tmp_path / "damaged").write_bytes(bytes(damaged))
    with pytest.raises(ArchiveError, match=r"digest|not a whole archive"):
        generation.load(tmp_path / "damaged", smallest())


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_an_encoder_is_saved_with_its_decoder(family: str, tmp_path: Path) -> None:
    model, given = readers.tiny(family), readers.reading(family)
    asked = {**given, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**asked)
    with intarsia.compile_generation(model, max_length=ROOM, batch=2, engines="onnxruntime") as made:
        generation.save(made, tmp_path / "file")
    with generation.load(tmp_path / "file", model) as loaded:
        assert torch.equal(model.generate(**asked), expected)
        assert loaded.forward.encoder is not None and loaded.forward.encoder.runs["encoder"] > 0
        assert loaded.forward.runs["own"] == 0

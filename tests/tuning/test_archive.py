"""A tuned program as one file."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.archive.forge import sealed
from tests.archive.test_mutations import edited
from tests.tuning.test_tune import ANYHOW, Block, Service, Stateful, agree, tuned_service
from torch import nn

import intarsia
from intarsia.archive.container import Writer
from intarsia.errors import ArchiveError
from intarsia.tuning import load, save


def test_what_was_tuned_is_saved_and_loaded(tmp_path: Path) -> None:
    service, tuned = tuned_service(Stateful())
    before = service.answer()
    save(tuned, tmp_path / "a.tuned")
    tuned.restore()
    again = load(tmp_path / "a.tuned", service)
    assert sorted(again.placed) == ["models['main'].blocks.0", "models['main'].blocks.1"]
    agree(service.answer(), before)
    assert all(placed.refused is None for placed in again.placed.values())
    assert not list(tmp_path.glob(".*"))


def test_a_loaded_program_sees_that_weights_are_written_to(tmp_path: Path) -> None:
    service, tuned = tuned_service()
    save(tuned, tmp_path / "a.tuned")
    tuned.restore()
    again = load(tmp_path / "a.tuned", service)
    line: nn.Linear = service.models["main"][0].line  # type: ignore[assignment,index,union-attr]
    with torch.no_grad():
        line.weight.mul_(2)
    with pytest.warns(UserWarning, match=r"0\.line\.weight was written to"):
        answer = service.answer()
    again.restore()
    agree(answer, service.answer())


def test_other_weights_other_places_and_other_files_are_refused(tmp_path: Path) -> None:
    service, tuned = tuned_service()
    path = tmp_path / "a.tuned"
    save(tuned, path)
    other = Service(nn.Sequential(Block(), Block()))
    with pytest.raises(ArchiveError, match="has other weights than when it was saved"):
        load(path, other)
    assert "forward" not in other.models["main"].__dict__
    with pytest.raises(ArchiveError, match="which this list does not have"):
        load(path, [nn.Linear(2, 2)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ArchiveError, match="not a whole archive"):
        load(path, service)
    with path.open("wb") as file:
        Writer(file).close({"format": "intarsia-tuned", "version": 9})
    with pytest.raises(ArchiveError, match="version 9"):
        load(path, service)
    tuned.restore()
    with pytest.raises(ArchiveError, match="nothing is tuned"):
        save(tuned, path)


def test_forged_and_damaged_files_raise_nothing_but_archive_errors(tmp_path: Path) -> None:
    """A file whose digests fit may be another program; it may not be another error, or another answer."""
    service, tuned = tuned_service()
    save(tuned, tmp_path / "a.tuned")
    tuned.restore()
    data, expected, random_state = (tmp_path / "a.tuned").read_bytes(), service.answer(), random.Random(4)
    refused = 0
    for number in range(24):
        forged = sealed(data, lambda manifest, _: edited(manifest, random_state)) if number % 2 else None
        at = random_state.randrange(len(data))
        (tmp_path / "b").write_bytes(forged or data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with load(tmp_path / "b", service):
                    agree(service.answer(), expected)
            except ArchiveError as error:
                refused += "\n" not in str(error)
    assert refused > 6
    agree(service.answer(), expected)


def test_a_file_without_calls_says_that_nothing_was_compared(tmp_path: Path) -> None:
    service, tuned = tuned_service()
    save(tuned, tmp_path / "a.tuned")
    for placed in tuned.placed.values():
        placed.examples.clear()  # as files of older versions are
    save(tuned, tmp_path / "old.tuned")
    tuned.restore()
    with load(tmp_path / "a.tuned", service) as again:
        assert not again.notes
    with load(tmp_path / "old.tuned", service) as again:
        assert "was not compared with its programs" in str(again)


class Plain(nn.Module):
    """Reads a tensor that is not a buffer, and images by channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(8, 8, 3, padding=1), torch.ones(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * self.table


@torch.no_grad()
def test_a_plain_tensor_that_is_written_to_is_seen(tmp_path: Path) -> None:
    model, x = Plain().eval(), torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last)
    with intarsia.tune([model], lambda: model(x), **ANYHOW) as tuned:
        save(tuned, tmp_path / "a.tuned")
    with load(tmp_path / "a.tuned", [model]) as again:
        assert again.placed
        model.table.mul_(2)
        with pytest.warns(UserWarning, match="table was written to"):
            made = model(x)
    torch.testing.assert_close(made, model(x))


class Returning(Plain):
    """Returns a weight beside its result."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.conv.weight


@torch.no_grad()
def test_weights_that_are_returned_are_not_saved(tmp_path: Path) -> None:
    model, x = Returning().eval(), torch.randn(2, 8, 8, 8)
    with intarsia.tune([model], lambda: model(x), **ANYHOW) as tuned:
        assert tuned.placed and model(x)[1] is model.conv.weight
        with pytest.raises(ArchiveError, match="returns weights of its own, which a file cannot store"):
            save(tuned, tmp_path / "a.tuned")


@pytest.mark.parametrize("change", ["activation", "heads", "epsilon"])
def test_another_module_of_the_same_weights_is_refused(change: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = {"activation": "gelu", "heads": 2, "epsilon": 1e-2}

    def layer(activation: str = "relu", heads: int = 4, epsilon: float = 1e-5) -> nn.Module:
        return nn.TransformerEncoderLayer(
            32, heads, 64, 0.0, activation, layer_norm_eps=epsilon, batch_first=True
        ).eval()

    model, other = layer(), layer(**{change: kinds[change]})  # type: ignore[arg-type]
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        tuned = intarsia.tune([model], lambda: model(x), only_if_faster=False, rounds=1, least_share=0.0)
        assert tuned.placed
        save(tuned, tmp_path / "a.tuned")
        expected = other(x)
        with pytest.raises(ArchiveError, match="has changed since it was saved"):
            load(tmp_path / "a.tuned", [other])
        assert torch.equal(other(x), expected)
        tuned.restore()
        with load(tmp_path / "a.tuned", [model]) as again:
            assert again.placed

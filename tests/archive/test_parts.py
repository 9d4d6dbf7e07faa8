"""Models compiled in parts: the parts are saved, and put into a model of the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.archive.forge import sealed
from tests.archive.gated import Gated, X
from torch import nn

import intarsia
from intarsia.errors import ArchiveError, StaleWeightsError
from intarsia.runtime.weights import tensor_digest


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Gated, Path]:
    torch.manual_seed(0)
    model = Gated().eval()
    fast = intarsia.compile(model, (X,), min_block_size=1)
    assert isinstance(fast, intarsia.PartlyCompiled) and sorted(fast.parts) == ["body", "tail"]
    intarsia.save(fast, tmp_path / "gated.intarsia")
    return model, tmp_path / "gated.intarsia"


def again(model: Gated) -> Gated:
    made = Gated().eval()
    made.load_state_dict(model.state_dict())
    return made


def test_parts_are_put_into_a_model_of_the_same_weights(saved: tuple[Gated, Path]) -> None:
    model, path = saved
    other = again(model)
    fast = intarsia.load(path, model=other)
    assert isinstance(fast, intarsia.PartlyCompiled) and sorted(fast.parts) == ["body", "tail"]
    assert {"pytorch"} < set(fast.plan.engines) and "cannot be exported" in str(fast.plan)
    assert "not captured as a whole" in fast.notes[0]
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(other.body), "the model itself is left as it was"
    assert fast.model.body[0].weight is other.body[0].weight, "weights are shared"
    with pytest.warns(UserWarning, match=r"body runs in PyTorch for this call: .*shape"):
        torch.testing.assert_close(fast(X[:1]), model(X[:1]), rtol=1e-4, atol=1e-5)


def test_weights_that_are_conjugated_lazily_have_a_digest() -> None:
    one = torch.tensor([1 + 2j, 3 - 1j])
    assert tensor_digest(one.conj()) == tensor_digest(one.conj().resolve_conj()) != tensor_digest(one)


def test_what_was_loaded_is_saved_and_loaded_again(saved: tuple[Gated, Path]) -> None:
    model, path = saved
    twice = path.with_name("twice.intarsia")
    intarsia.save(intarsia.load(path, model=model), twice)
    fast = intarsia.load(twice, model=again(model))
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_new_process_answers_alike(saved: tuple[Gated, Path]) -> None:
    model, path = saved
    torch.save(model.state_dict(), path.with_suffix(".pt"))
    script = f"""
import sys, torch, intarsia
from tests.archive.gated import X, Gated
model = Gated().eval()
model.load_state_dict(torch.load({str(path.with_suffix(".pt"))!r}))
fast = intarsia.load({str(path)!r}, model=model)
rooms = ("convert", "rewrite", "partition", "build", "choose", "compiler", "report", "pipeline")
assert not {{f"intarsia.{{room}}" for room in rooms}} & set(sys.modules)
torch.save(fast(X), {str(path.with_suffix(".answer"))!r})
"""
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=250
    )
    assert ran.returncode == 0, ran.stderr
    torch.testing.assert_close(torch.load(path.with_suffix(".answer")), model(X), rtol=1e-4, atol=1e-5)


def test_a_weight_written_to_is_told(saved: tuple[Gated, Path]) -> None:
    model, path = saved
    fast = intarsia.load(path, model=model)
    with torch.no_grad():
        model.body[0].weight.mul_(2)
    with pytest.raises(StaleWeightsError, match=r"0\.weight"):
        fast(X)
    with pytest.raises(StaleWeightsError, match=r"0\.weight"):
        intarsia.save(fast, path.with_name("stale.intarsia"))
    assert not path.with_name("stale.intarsia").exists()


def test_without_its_model_or_with_another_it_is_refused(saved: tuple[Gated, Path]) -> None:
    model, path = saved
    with pytest.raises(ArchiveError, match=r"parts of a Gated, .*load\(path, model=\.\.\.\)"):
        intarsia.load(path)
    with pytest.raises(ArchiveError, match="parts of a Gated, not of a Linear"):
        intarsia.load(path, model=nn.Linear(8, 8))
    other = again(model)
    other.tail = nn.Identity()
    with pytest.raises(ArchiveError, match="has Identity at 'tail'; the file has a Sequential"):
        intarsia.load(path, model=other)
    other = again(model)
    with torch.no_grad():
        other.scale.mul_(2)  # which belongs to no part, and is not in the state dict
    with pytest.raises(ArchiveError, match="other weights than when it was saved: scale differs"):
        intarsia.load(path, model=other)
    other = again(model)
    other.extra = nn.Linear(1, 1)
    with pytest.raises(ArchiveError, match=r"only the model has extra\.weight"):
        intarsia.load(path, model=other)
    whole = path.with_name("whole.intarsia")
    intarsia.save(intarsia.compile(nn.ReLU(), (X,)), whole)
    with pytest.raises(ArchiveError, match="without model="):
        intarsia.load(whole, model=model)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda m, _: m.update(version=9), "version 9"),
        (lambda m, _: m["types"].update({"": m["types"].pop("tail")}), "nothing at ''"),
        (lambda m, _: m["programs"].pop("tail"), "are inconsistent"),
        (lambda m, _: m.pop("weights"), "are inconsistent"),
        (lambda m, _: m.update(types=[1]), "are inconsistent"),
    ],
)
def test_forged_files_are_refused(saved: tuple[Gated, Path], edit: object, told: str) -> None:
    model, path = saved
    path.write_bytes(sealed(path.read_bytes(), edit))  # type: ignore[arg-type]
    with pytest.raises(ArchiveError, match=told):
        intarsia.load(path, model=model)


def test_damaged_files_are_refused(saved: tuple[Gated, Path]) -> None:
    model, path = saved
    whole = path.read_bytes()
    for place in range(100, len(whole) - 100, len(whole) // 23):
        damaged = path.with_name(f"{place}.intarsia")
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        try:
            fast = intarsia.load(damaged, model=model)
        except ArchiveError:
            continue
        torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)  # a byte that nobody reads
    path.write_bytes(whole[:-50])
    with pytest.raises(ArchiveError, match="not a whole archive"):
        intarsia.load(path, model=model)

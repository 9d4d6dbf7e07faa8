"""Packages of AOTInductor: machine code in a file, run only by who asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.archive.forge import members, sealed
from torch import nn

import intarsia
from intarsia.archive.engines import packed_for
from intarsia.engines import Inductor
from intarsia.errors import ArchiveError

X = torch.linspace(-1, 1, 48).reshape(3, 16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A file with a package, and what its module answers, made once: its C++ takes long."""
    if (reason := Inductor().unavailable()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    fast = intarsia.compile(model, (X,), engines=Inductor(), min_block_size=1)
    path = tmp_path_factory.mktemp("native") / "m"
    intarsia.save(fast, path, inductor="aot")
    return path, fast(X)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled where Inductor builds, or runs a package."""
    done: list[str] = []
    for name in ("build", "load_package"):
        old = getattr(Inductor, name)

        def note(self: Inductor, *args: object, name: str = name, old: object = old) -> object:
            done.append(name)
            return old(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(Inductor, name, note)
    return done


@pytest.mark.full
def test_a_package_is_run_by_who_trusts_it_and_needs_no_compiler(
    saved: tuple[Path, torch.Tensor], built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved
    monkeypatch.setattr("intarsia.engines.inductor.engine._has_compiler", lambda: False)
    loaded = intarsia.load(path, trust_native_code=True)
    assert built == ["load_package"]
    assert loaded.plan.engines == ("inductor",)
    assert not loaded.notes
    assert torch.allclose(loaded(X), expected, atol=1e-6)
    assert torch.allclose(loaded(X.T.contiguous().T), expected, atol=1e-6)  # laid out otherwise


@pytest.mark.full
def test_nobody_runs_a_package_without_asking(saved: tuple[Path, torch.Tensor], built: list[str]) -> None:
    path, expected = saved
    loaded = intarsia.load(path)
    assert built == ["build"]
    assert any("not trusted" in note for note in loaded.notes)
    assert torch.allclose(loaded(X), expected, atol=1e-6)


@pytest.mark.full
def test_a_package_of_another_machine_is_built_anew(
    saved: tuple[Path, torch.Tensor], built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved
    monkeypatch.setattr("intarsia.archive.engines.processor_features", lambda: "none")
    loaded = intarsia.load(path, trust_native_code=True)
    assert built == ["build"]
    assert any("another version or machine" in note for note in loaded.notes)
    assert torch.allclose(loaded(X), expected, atol=1e-6)


@pytest.mark.full
def test_a_package_that_is_none_runs_in_pytorch_and_is_told(
    saved: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    path, expected = saved

    def edit(manifest: dict[str, object], found: dict[str, bytes]) -> None:
        found["native/0.pt2"] = b"no package" * 9

    (tmp_path / "forged").write_bytes(sealed(path.read_bytes(), edit))
    with pytest.warns(UserWarning, match="AOTInductor refuses its package"):
        loaded = intarsia.load(tmp_path / "forged", trust_native_code=True)
    assert torch.allclose(loaded(X), expected, atol=1e-6)


@pytest.mark.full
def test_a_damaged_package_is_refused(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    path, _ = saved
    data = bytearray(path.read_bytes())
    at = bytes(data).index(members(bytes(data))["native/0.pt2"])
    data[at + 1000] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(ArchiveError, match=r"native/0\.pt2 does not match its digest"):
        intarsia.load(tmp_path / "damaged", trust_native_code=True)


def test_a_file_that_claims_machine_code_runs_none_unasked(tmp_path: Path) -> None:
    if (reason := Inductor().unavailable()) is not None:
        pytest.skip(reason)
    fast = intarsia.compile(nn.Sequential(nn.ReLU()), (X,), engines=Inductor(), min_block_size=1)
    intarsia.save(fast, tmp_path / "m")

    def edit(manifest: dict[str, Any], found: dict[str, bytes]) -> None:
        piece = manifest["programs"]["model"]["inlay"]["pieces"][0]
        piece["native"] = {"package": "native/0.pt2", "for": packed_for(Inductor())}
        found["native/0.pt2"] = b"no package" * 9

    (tmp_path / "forged").write_bytes(sealed((tmp_path / "m").read_bytes(), edit))
    plain = intarsia.load(tmp_path / "forged")
    assert plain.plan.engines == ("inductor",)
    assert any("not trusted" in note for note in plain.notes)
    with pytest.warns(UserWarning, match="AOTInductor refuses its package"):
        trusted = intarsia.load(tmp_path / "forged", trust_native_code=True)
    assert torch.equal(plain(X), X.relu())
    assert torch.equal(trusted(X), X.relu())


def test_what_has_no_code_to_package_says_so(tmp_path: Path) -> None:
    fast = intarsia.compile(nn.ReLU(), (torch.ones(2),), engines="pytorch")
    with pytest.raises(ArchiveError, match="none of its segments runs on an engine that packages"):
        intarsia.save(fast, tmp_path / "m", inductor="aot")
    with pytest.raises(ArchiveError, match="'rebuilt' when a file is loaded"):
        intarsia.save(fast, tmp_path / "m", inductor="both")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())

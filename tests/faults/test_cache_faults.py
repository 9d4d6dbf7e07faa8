"""The cache directory is never fatal: missing, unwritable, full of junk, or shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia


def _below_a_file(at: Path) -> Path:
    (at / "file").write_text("no directory")
    return at / "file" / "cache"


def _junk(at: Path) -> Path:
    """Every file that a run leaves behind, overwritten by bytes that are no JSON."""
    for path in at.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\x00\xff{[" * 7)
    return at


def _lists(at: Path) -> Path:
    for path in at.rglob("*"):
        if path.is_file():
            path.write_text("[1, 2, 3]")
    return at


def _directories(at: Path) -> Path:
    for path in list(at.rglob("*")):
        if path.is_file():
            path.unlink()
            path.mkdir()
    return at


def _read_only(at: Path) -> Path:
    at.chmod(0o500)
    return at


@pytest.mark.parametrize("spoil", [_below_a_file, _junk, _lists, _directories, _read_only])
def test_compiling_goes_on(
    spoil: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    x = torch.randn(2, 8)
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    intarsia.compile(model, (x,))
    monkeypatch.setenv("INTARSIA_CACHE", str(spoil(tmp_path)))
    try:
        fast = intarsia.compile(model, (x,))
    finally:
        tmp_path.chmod(0o700)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-6)

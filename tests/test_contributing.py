"""CONTRIBUTING walks through five additions. Each is performed here as written: one file, and its use."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
SECTIONS = {
    title: re.findall(r"```python\n(.*?)```", text, re.S)
    for title, text in re.findall(r"^## Add an? ([\w ]+)\n(.*?)(?=^## )", GUIDE, re.S | re.M)
}

pytest.importorskip("onnxruntime")


def test_the_guide_has_the_five_additions() -> None:
    assert list(SECTIONS) == [
        *("converter", "engine", "rewriting pattern", "partition strategy", "pipeline schedule"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_an_addition_is_one_file(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, use = SECTIONS[title]
    name = f"own_{title.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    added = importlib.import_module(name)
    try:
        exec(compile(use, f"use_of_{name}.py", "exec"), dict(vars(added)))
    finally:
        _take_back(added)


def _take_back(added: object) -> None:
    """What registers itself does so for the whole process; other tests must not meet it."""
    from intarsia.convert import registry
    from intarsia.pipeline import SCHEDULES

    if hasattr(added, "spherical_bessel_j0"):
        registry.unregister(added.spherical_bessel_j0.converters[0])
    SCHEDULES.pop("BackwardFromTheEnd", None)

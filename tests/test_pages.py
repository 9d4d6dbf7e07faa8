"""Every Python block of the README and of docs/ runs as written, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# The blocks of docs/pipeline.md run in several processes; tests/pipeline runs them.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.stem != "pipeline"),
]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\nprints\n\n```\n(.*?)```)?", re.S)

pytestmark = [pytest.mark.slow, pytest.mark.openvino]


def _blocks(page: Path) -> list[tuple[str, str | None]]:
    """The code of each block and what it prints. Doctests have tests of their own, beside what they show."""
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]
    return [block for block in blocks if not block[0].startswith(">>>")]


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.stem)
def test_blocks_run_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share their names, as a reader who types them in order has them."""
    if page.stem == "gpu" and not torch.cuda.is_available():
        pytest.skip("the examples of docs/gpu.md need an NVIDIA GPU")
    monkeypatch.chdir(tmp_path)  # some blocks write files
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code, expected in _blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "example.py", "exec"), module.__dict__)
        if expected is not None:
            assert printed.getvalue() == expected

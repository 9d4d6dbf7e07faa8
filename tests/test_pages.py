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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\nprints\n\n```\n(.*?)```)?", re.S)
SCRIPT = re.compile(r"# (\w+\.py)\n")  # a block that is a file, which tests/pipeline/test_mesh.py runs


def _blocks(page: Path) -> list[tuple[str, str | None]]:
    """The code of each block and what it prints. Doctests have tests of their own, beside what they show."""
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]
    return [block for block in blocks if not block[0].startswith(">>>") and not SCRIPT.match(block[0])]


@pytest.mark.slow
@pytest.mark.openvino
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


def test_the_gains_of_the_readme_are_those_of_the_measurements() -> None:
    gains = (
        (ROOT / "README.md").read_text().partition("## What it gains")[2].partition("## What it promises")[0]
    )
    figures = re.findall(r"\d+\.\d+", gains)
    measured = set(re.findall(r"\d+\.\d+", (ROOT / "docs" / "measurements.md").read_text()))
    assert len(figures) > 8
    assert [figure for figure in figures if not {figure, f"{figure}0"} & measured] == []


def test_blocks_that_do_not_run_have_a_reason() -> None:
    """Blocks marked `py`: code of other libraries, a GPU, a cluster."""
    pages = {page.stem for page in PAGES if re.search(r"^```py$", page.read_text(), re.M)}
    assert pages == {
        *("aitune", "torchgpipe", "torch_tensorrt", "optimum", "tensorrt_llm"),
        "generation",  # a GPU
        "pipeline_processes",  # as many processes as the plan says
    }


def test_every_page_is_in_the_navigation_and_every_link_to_the_site_has_a_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f": {page}" not in navigation} == set()
    links = re.findall(r"https://intarsia\.github\.io/intarsia/([\w/]+)/", (ROOT / "README.md").read_text())
    assert len(links) > 10 and {link for link in links if f"{link}.md" not in pages} == set()


def test_the_architecture_page_names_what_there_is() -> None:
    page, source = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "src" / "intarsia"
    paths = set(re.findall(r"`([\w/]+(?:/|\.py))`", page))
    inside = {
        "fusions/",
        "aten/",
        "guards/",
        "base.py",
        "job.py",
        "entry.py",
        "gpipe/",
        "stages/",
        "distributed/",
        "plan/",
    }
    assert {path for path in paths - inside if not (source / path).exists()} == set()
    packages = {f"{folder.name}/" for folder in source.iterdir() if (folder / "__init__.py").exists()}
    assert packages - paths == set()
    glossary = page.partition("## Glossary")[2]
    assert len(re.findall(r"^\| (?!word|---)", glossary, re.M)) <= 25


def test_the_commands_of_the_pages_are_those_of_the_command_line() -> None:
    from typer.main import get_command

    from intarsia.cli.main import app

    commands = set(get_command(app).commands)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    code = re.compile(r"(?:^|`)intarsia ([a-z]+)\b", re.M)
    assert {name for page in pages for name in code.findall(page.read_text())} <= commands
    reference = (ROOT / "docs" / "command_line.md").read_text()
    assert {name for name in commands if f"`intarsia {name}" not in reference} == set()

"""The package declares what it imports, and the wheel holds what its users run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "intarsia"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A feature that needs an extra may import it at the top of its own files; all others, inside a function.
FEATURES = {"generation": "generation", "serve": "serve"}
FOR_DEVELOPERS = ("dev", "models")


def _modules(requirements: list[str]) -> set[str]:
    """The modules of requirements, by the rule that a distribution's module is its name with `_` for `-`."""
    names = [re.split(r"[\[<>=~! ]", requirement)[0] for requirement in requirements]
    return {name.replace("-", "_") for name in names} - {"intarsia"}


def _imports(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Each module that is imported when a file runs, and whether a function imports it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.split(".")[0], in_function
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _imports(node, inside)


def test_every_import_is_a_dependency() -> None:
    required = _modules(PROJECT["dependencies"])
    extras = {
        name: _modules(requirements)
        for name, requirements in PROJECT["optional-dependencies"].items()
        if name not in FOR_DEVELOPERS
    }
    undeclared = []
    for file in sorted(SOURCE.rglob("*.py")):
        package = file.relative_to(SOURCE).parts[0]
        for module, in_function in _imports(ast.parse(file.read_text())):
            if module in sys.stdlib_module_names or module in required | {"intarsia"}:
                continue
            homes = [extra for extra, modules in extras.items() if module in modules]
            if not homes or not (in_function or any(FEATURES.get(extra) == package for extra in homes)):
                undeclared.append(f"{file.relative_to(ROOT)}: {module}")
    assert undeclared == []


@pytest.mark.slow
def test_the_wheel_runs_without_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the tool that builds the wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(target)
    assert {name.split("/")[0] for name in names} == {"intarsia", f"intarsia-{PROJECT['version']}.dist-info"}
    (metadata,) = target.glob("*.dist-info/METADATA")
    requires = HeaderParser().parsestr(metadata.read_text()).get_all("Requires-Dist") or []
    assert {"safetensors", "torch>=2.11"} <= set(requires)
    (entry_points,) = target.glob("*.dist-info/entry_points.txt")
    assert "intarsia = intarsia.cli.main:main" in entry_points.read_text()

    script = (
        "import intarsia, torch\n"
        f"assert intarsia.__file__.startswith({str(target)!r})\n"
        "model, x = torch.nn.Linear(3, 4).eval(), torch.ones(2, 3)\n"
        "fast = intarsia.compile(model, (x,), min_block_size=1)\n"
        f"intarsia.save(fast, {str(tmp_path / 'saved')!r})\n"
        f"torch.testing.assert_close(intarsia.load({str(tmp_path / 'saved')!r})(x), model(x))\n"
    )
    commands = (["-m", "intarsia", "--help"], ["-m", "intarsia", "engines"], ["-c", script])
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(target), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)

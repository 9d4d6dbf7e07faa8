"""The package declares what it imports, and the wheel holds what its users run."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "intarsia"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A feature that needs an extra may import it at the top of its own files; all others, inside a function.
FEATURES = {"generation": ("checkpoint", "generation"), "serve": ("serve",)}
FOR_DEVELOPERS = ("dev", "docs", "models")


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


WITH_TORCH = {"triton"}  # torch's builds for GPUs bring it; kernels are imported on a GPU only


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
            if module in sys.stdlib_module_names or module in required | {"intarsia"} | WITH_TORCH:
                continue
            homes = [extra for extra, modules in extras.items() if module in modules]
            if not homes or not (in_function or any(package in FEATURES.get(extra, ()) for extra in homes)):
                undeclared.append(f"{file.relative_to(ROOT)}: {module}")
    assert undeclared == []


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, as a package index serves both."""
    pytest.importorskip("hatchling", reason="the tool that builds the wheel")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    _run([*build, "-t", "sdist"], cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    _run([*build, "-t", "wheel"], cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        facts = HeaderParser().parsestr(archive.read(metadata).decode())
        commands = archive.read(entry_points).decode()
    assert {name.split("/")[0] for name in names} == {"intarsia", f"intarsia-{PROJECT['version']}.dist-info"}
    assert "intarsia/py.typed" in names
    assert {"safetensors", "torch>=2.11"} <= set(facts.get_all("Requires-Dist") or [])
    assert {"Homepage", "Documentation", "Issues", "Changelog"} == {
        url.split(",")[0] for url in facts.get_all("Project-URL") or []
    }
    assert "intarsia = intarsia.cli.main:main" in commands
    description = facts.get_payload()
    # A package index shows the README alone: a link into the repository would lead nowhere.
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", description) == []


MODEL = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval(), (torch.randn(4, 64),)
"""
SCRIPT = """
import sys
import intarsia, torch
from model import make

assert intarsia.__file__.startswith(sys.prefix), intarsia.__file__
model, args = make()
fast = intarsia.compile(model, args, min_block_size=1)
intarsia.save(fast, "saved.intarsia")
torch.testing.assert_close(intarsia.load("saved.intarsia")(*args), model(*args))
"""


class Environment:
    """An environment with the wheel and an extra, which links to packages of another environment."""

    def __init__(self, folder: Path, wheel: Path, extra: str, linked: list[Path]) -> None:
        venv.create(folder, symlinks=True)
        self.bin, (self.site,) = folder / "bin", folder.glob("lib/python*/site-packages")
        for path in linked:
            (self.site / path.name).symlink_to(path)
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        install = [self.bin / "python", "-m", "pip", "install", "--quiet", "--no-compile", target]
        _run([*install, "--constraint", ROOT / "constraints.txt"], cwd=folder)

    def run(self, *words: str, cwd: Path) -> str:
        """What a command of the environment prints."""
        return _run([self.bin / words[0], *words[1:]], cwd=cwd, env=self._variables(cwd))

    def serve(self, file: str, cwd: Path) -> dict[str, object]:
        """What a server says of a file at GET /."""
        command = [self.bin / "intarsia", "serve", file, "--port", "0"]
        with subprocess.Popen(
            command, cwd=cwd, env=self._variables(cwd), stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            try:
                address = next(
                    found[0] for line in server.stdout if (found := re.search(r"http://\S+", line))
                )
                with urllib.request.urlopen(address, timeout=60) as answer:
                    return json.load(answer)  # type: ignore[no-any-return]
            finally:
                server.terminate()

    def _variables(self, home: Path) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": str(home), "OMP_NUM_THREADS": "1"}


def _run(command: list[str | Path], cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """The wheel without an extra. Of this environment's packages it has torch and pip alone.

    pip finds torch's metadata, so torch is not downloaded, and what torch requires is installed.
    """
    ours = Path(torch.__file__).parents[1]
    names = ("torch", "torch-*", "torchgen", "functorch", "pip", "pip-*")
    linked = [path for name in names for path in ours.glob(name)]
    return Environment(tmp_path_factory.mktemp("plain"), wheel, "", linked)


EXTRAS = ["", *(name for name in PROJECT["optional-dependencies"] if name not in FOR_DEVELOPERS)]
_ALWAYS = ("", "onnxruntime", "serve", "all")  # the others take as long, and show little that these do not


@pytest.mark.parametrize(
    "extra",
    [pytest.param(e, marks=pytest.mark.slow if e in _ALWAYS else pytest.mark.full) for e in EXTRAS],
)
def test_an_extra_installs_what_it_needs(extra: str, plain: Environment, wheel: Path, tmp_path: Path) -> None:
    environment = plain
    if extra:  # beside the packages that every environment has
        linked = [path for path in plain.site.iterdir() if not path.name.startswith("intarsia")]
        environment = Environment(tmp_path / "env", wheel, extra, linked)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    assert "Usage" in environment.run("intarsia", "--help", cwd=folder)
    engines = json.loads(environment.run("intarsia", "engines", "--json", cwd=folder))
    expected = {"onnxruntime": {"onnxruntime"}, "openvino": {"openvino"}, "nncf": {"openvino"}}
    for name in expected.get(extra, {"onnxruntime", "openvino"} if extra == "all" else set()):
        assert engines[name]["usable"], engines[name]
    environment.run("python", "-c", SCRIPT, cwd=folder)
    assert "wrote" in environment.run(
        "intarsia", "compile", "model.py:make", "-o", "own.intarsia", cwd=folder
    )
    assert "float32 (4, 8)" in environment.run("intarsia", "run", "own.intarsia", cwd=folder)
    if extra in ("generation", "all"):
        assert "bert" in environment.run("intarsia", "demo", "--list", cwd=folder)
        assert "Plan by" in environment.run("intarsia", "explain", "bert", cwd=folder)
    if extra == "all":
        _walk_a_newcomers_path(environment, tmp_path / "newcomer")
    if extra in ("serve", "all"):
        assert environment.serve("own.intarsia", folder)["outputs"] == ["output"]


def _walk_a_newcomers_path(environment: Environment, folder: Path) -> None:
    """`examples/newcomer.sh` runs, and docs/newcomer.md shows its commands with their output."""
    folder.mkdir()
    variables = {"PATH": f"{environment.bin}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    variables["INTARSIA_MEASURE"] = "0"  # the demo measures for long on a busy machine
    printed = _run(["bash", ROOT / "examples" / "newcomer.sh"], cwd=folder, env=variables)
    page = (ROOT / "docs" / "newcomer.md").read_text()
    assert re.findall(r"^\$ .*", printed, re.M) == re.findall(r"^\$ .*", page, re.M)
    for line in (
        "wrote report.html",
        "largest difference below 1e-5: True",
        "8 rows of 10 probabilities",
        "make.onnx computes what the model does, to rounding",
    ):
        assert line in printed and line in page

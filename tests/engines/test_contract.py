"""The contract of engines: an engine says everything about itself, and the rest of the package asks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.engines.rewritten import lowered
from torch import fx, nn

import intarsia
from intarsia.choose.memory import key_of
from intarsia.engines import (
    Engine,
    GraphEngine,
    Inductor,
    OnnxRuntime,
    OpenVINO,
    Program,
    PyTorch,
    Workload,
    default_engines,
    known_engines,
    short_engines,
)
from intarsia.network import Network
from intarsia.rewrite import PatternRewriter, RewritePatternManager

SOURCE = Path(intarsia.__file__).parent


@dataclass(frozen=True)
class Versioned(GraphEngine):
    """PyTorch under another name, whose version a test sets."""

    name: ClassVar[str] = "versioned"
    current: ClassVar[str] = "1.0"

    def unavailable(self) -> str | None:
        return None

    def version(self) -> str:
        return self.current

    def build(self, module: fx.GraphModule) -> Program:
        return PyTorch().build(module)


@pytest.mark.parametrize("kind", known_engines().values(), ids=lambda kind: kind.name)
def test_a_shipped_engine_tells_the_versions_of_its_libraries(kind: type[Engine]) -> None:
    versions = kind().version().split(", ")
    assert [one.split()[0] for one in versions] == ["intarsia", *kind.libraries]
    assert kind.libraries, "an engine that this package ships runs on a library"


def test_shorter_arithmetic_is_versioned_by_its_own_library() -> None:
    """Packed programs of OpenVINO in float16 were once kept by torch's version."""
    for name, kind in known_engines().items():
        if name.startswith("openvino"):
            assert f"openvino {known_engines()['openvino']().version().split()[-1]}" in kind().version()


def test_measurements_are_kept_by_the_engine_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of("a block", [Versioned()])
    assert key_of("a block", [Versioned()]) == before
    monkeypatch.setattr(Versioned, "current", "1.1")
    assert key_of("a block", [Versioned()]) != before


# --- nothing outside `engines/` names an engine ---

_MAY_NAME = (
    "__init__.py",  # public names
    "cli/",  # what the command line offers and compares with
    "fuzz/draw.py",  # the line-ups that are drawn
    "archive/engines.py",  # until it asks for `version()`
    "archive/files.py",  # the public option `save(inductor=...)`
    "backend/dynamo_backend.py",  # a message about torch.compile's own options
)
# Names and folders of torch itself.
_OF_TORCH = re.compile(r"cudnn|cudnn_enabled?|_scaled_dot_product_cudnn\w*|torch/_inductor/")
# PyTorch is the last engine of every plan, and not an engine among others.
_ENGINE_NAMES = re.compile("|".join(name for name in known_engines() if name != "pytorch"), re.IGNORECASE)


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every identifier, imported module and text of some code, docstrings left out."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield getattr(node, "lineno", 0), name
            case ast.ImportFrom(module=str(name)):
                yield node.lineno, name
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield node.lineno, text


def test_nothing_outside_names_an_engine() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith("engines/") or place.startswith(_MAY_NAME):
            continue
        for line, text in _names(ast.parse(path.read_text())):
            is_example = "such as" in text or "e.g." in text or _OF_TORCH.fullmatch(text)
            if _ENGINE_NAMES.search(text) and not is_example:
                found.append(f"{place}:{line}: {text}")
    assert not found, "ask the engine instead (see engines/base.py):\n" + "\n".join(found)


# --- what engines say by default, and what ours say ---


def test_which_engines_are_asked_by_default() -> None:
    assert [engine.name for engine in default_engines("cpu")] == ["openvino", "onnxruntime", "pytorch"]
    assert [engine.name for engine in default_engines("cuda")] == ["inductor", "pytorch"]
    assert [engine.name for engine in default_engines("mps")] == ["pytorch"]


def test_an_engine_in_shorter_arithmetic_names_the_exact_one() -> None:
    assert len(short_engines()) == 9
    for kind in short_engines().values():
        assert kind.based_on in known_engines() and not kind.is_default("cpu")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x) + self.v(x)


def _labels(engine: Engine, workload: Workload) -> list[str]:
    return [label for label, _ in engine.variants(workload)]


def test_inductor_is_tried_without_the_rewrites_that_apply() -> None:
    merged = lowered(Attention(), torch.randn(2, 8))
    plain = lowered(nn.ReLU(), torch.randn(2, 8))
    assert _labels(Inductor(), Workload(plain, on_gpu=True)) == []
    assert _labels(Inductor(), Workload(merged)) == []
    assert _labels(Inductor(), Workload(merged, on_gpu=True)) == ["no rewrites"]
    thorough = Workload(merged, on_gpu=True, thorough=True)
    assert _labels(Inductor(), thorough) == ["no rewrites", "without merged_products"]
    assert _labels(Inductor(rewrites=()), thorough) == []
    ((_, other),) = Inductor().variants(Workload(merged, on_gpu=True))
    assert other == Inductor(rewrites=())


def test_threads_are_varied_unless_they_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    module = lowered(nn.ReLU(), torch.randn(2, 8))
    quick, many = Workload(module), Workload(module, objective="throughput")
    assert _labels(OnnxRuntime(), quick) == ["2 threads"]
    assert _labels(OnnxRuntime(), Workload(module, thorough=True)) == ["not spinning", "2 threads"]
    assert _labels(OnnxRuntime(), many) == ["1 thread a call"]
    assert _labels(OpenVINO(), quick) == ["2 threads"] and _labels(OpenVINO(), many) == ["4 streams"]
    assert _labels(OnnxRuntime(threads=3), quick) == _labels(OpenVINO(threads=3), quick) == []


def test_pytorch_is_tried_with_images_in_channels_last() -> None:
    images = lowered(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8))
    assert _labels(PyTorch(), Workload(images)) == ["channels_last"]
    assert _labels(PyTorch(rewrites=("batch_norms",)), Workload(images)) == []


# --- rewriting asks the engine ---


@dataclass(frozen=True)
class Frugal(OnnxRuntime):
    """An engine that refuses every layer of attention."""

    name: ClassVar[str] = "frugal"
    groups: tuple[str, ...] = ("onnx",)

    def patterns(self) -> Collection[str]:
        return self.groups

    def probe(self, net: Network) -> str | None:
        if any(layer.kind == "Gelu" for layer in net.get_layers()):
            return "it knows no Gelu"
        return super().probe(net)


class Erf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


def _compiled(engine: Engine, rewrite: object) -> intarsia.Compiled:
    return intarsia.compile(Erf(), (torch.randn(3),), engines=[engine], min_block_size=1, rewrite=rewrite)


def test_a_pattern_whose_layers_the_engine_refuses_is_left_out_with_a_note() -> None:
    compiled = _compiled(Frugal(), True)
    assert compiled.plan.engines == ("frugal",)
    reason = "frugal refuses the layers that the rewrite makes: it knows no Gelu"
    assert list(compiled.notes).count(f"frugal: pattern 'gelu_exact' is left out: {reason}") == 1
    assert not any("left out" in note for note in _compiled(Frugal(), None).notes)


def test_an_engine_that_allows_no_patterns_says_so() -> None:
    notes = _compiled(Frugal(groups=()), True).notes
    assert "frugal: it supports none of the shipped patterns" in notes


@pytest.fixture
def _failing() -> Iterator[None]:
    class Failing(PatternRewriter):
        def match_and_rewrite(self, layer: object) -> bool:
            raise KeyError("scale")

    RewritePatternManager.instance().add("failing", Failing("failing", {"Mul"}))
    yield
    RewritePatternManager.instance().remove("failing")


@pytest.mark.usefixtures("_failing")
def test_a_pattern_of_the_user_that_raises_is_told() -> None:
    compiled = _compiled(OnnxRuntime(), None)
    (note,) = [note for note in compiled.notes if "failing" in note]
    assert note.startswith("pattern 'failing' at layer mul")
    assert note.endswith("was undone: KeyError: 'scale' (and at 1 more layers)")

"""Nothing private of `onnx_ir` is read or written, and its objects are made by its constructors alone."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import onnx_ir as ir
import pytest

SOURCE = Path(__file__).parents[1] / "src" / "intarsia"
ROOMS = ("network", "rewrite")  # which hold its objects: here nobody's private names are read


def _uses_onnx_ir(source: str) -> bool:
    if "onnx_ir" not in source and "onnxscript" not in source:  # every worker asks it of every file
        return False
    tree = ast.parse(source)
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] in ("onnx_ir", "onnxscript") for name in names)


def _private_names() -> set[str]:
    """The private attributes of all public classes of `onnx_ir`."""
    found: set[str] = set()
    for _, kind in inspect.getmembers(ir, inspect.isclass):
        for base in kind.__mro__:
            found |= {*vars(base), *getattr(base, "__slots__", ())}
    graph = ir.Graph([], [], nodes=[])
    found |= {*vars(graph), *vars(ir.Node("", "Relu", []).attributes)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def _files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if _uses_onnx_ir(path.read_text())]


def _offences(source: str, forbidden: set[str] | None) -> list[str]:
    """Private names of anything but oneself (all, or those forbidden), and objects made behind a class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [str(getattr(node, "module", "")), *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: imports {name}" for name in modules if name.startswith("onnx_ir._")]
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr == "__new__" and owner == "object":
            found.append(f"{node.lineno}: object.__new__")
        if node.attr.startswith("__") or owner in ("self", "cls"):
            continue
        if forbidden is None or node.attr in forbidden:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_private_of_onnx_ir(path: Path) -> None:
    everything = path.relative_to(SOURCE).parts[0] in ROOMS
    assert _offences(path.read_text(), None if everything else _private_names()) == []


def test_the_check_sees_what_it_should() -> None:
    names = _private_names()
    assert {"_uses", "_producer", "_inputs", "_nodes", "_name_authority", "_frozen"} <= names
    for line in ("value._uses", "node._graph = None", "make()._inputs", "from onnx_ir._core import Usage"):
        assert _offences(line, names), line
    assert _offences("new = object.__new__(ir.Node)", names)
    assert not _offences("self._nodes; aten._softmax.default; x.__class__", names)


def test_classes_of_onnx_ir_are_left_as_they_are() -> None:
    import intarsia.network
    import intarsia.rewrite  # noqa: F401

    for kind in (ir.Node, ir.Value, ir.Graph, ir.Shape, ir.TensorType):
        ours = [
            name for name, item in vars(kind).items() if "intarsia" in str(getattr(item, "__module__", ""))
        ]
        assert not ours

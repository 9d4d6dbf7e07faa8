"""The shape of the source: classes of few parts, files of one subject, and no import that is a text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "intarsia"
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}

MOST_PARAMETERS = 8  # frozen records, which are data and do nothing, are not counted
MOST_LINES = 400


def _fields(kind: ast.ClassDef) -> int:
    """The parameters of a dataclass's constructor."""
    own = [item for item in kind.body if isinstance(item, ast.AnnAssign)]
    given = [item for item in own if item.value is None or "init=False" not in ast.unparse(item.value)]
    return sum("ClassVar" not in ast.unparse(item.annotation) for item in given)


def _constructors() -> Iterator[tuple[str, int]]:
    for tree in TREES.values():
        for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    arguments = method.args
                    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                    yield kind.name, len(named) - 1
            written = [ast.unparse(decorator) for decorator in kind.decorator_list]
            if any("dataclass" in text and "frozen=True" not in text for text in written):
                yield kind.name, _fields(kind)


def test_no_class_takes_more_than_eight_parameters() -> None:
    counts = dict(sorted(_constructors(), key=lambda pair: pair[1]))  # the largest of classes of one name
    assert len(counts) > 100
    assert {name: n for name, n in counts.items() if n > MOST_PARAMETERS} == {}


def test_files_have_one_subject() -> None:
    lengths = {name: len((SOURCE / name).read_text().splitlines()) for name in TREES}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_no_import_is_written_as_a_text() -> None:
    """A package may hand out its own names when they are asked for; what else is a text hides an import."""
    hidden = [
        (name, call.args[0].value)
        for name, tree in TREES.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("import_module")
        if isinstance(call.args[0], ast.Constant)
    ]
    assert hidden == []

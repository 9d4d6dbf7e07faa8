"""The contract of engines: an engine says everything about itself, and the rest of the package asks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import fx

from intarsia.choose.memory import key_of
from intarsia.engines import Engine, GraphEngine, Program, PyTorch, known_engines


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

"""The files that are begun first, and the tests that are left to `make test-slow`."""

from __future__ import annotations

from pathlib import Path

from tests.longest import LONGEST
from tests.slow import SLOW, is_slow

ROOT = Path(__file__).parents[1]


def test_the_longest_files_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_the_slow_tests_are_there() -> None:
    gone = []
    for entry in SLOW:
        file, _, name = entry.partition("::")
        if not (ROOT / file).is_file() or f"def {name}" not in (ROOT / file).read_text():
            gone.append(entry)
    assert gone == []


def test_an_entry_is_a_file_a_test_or_a_case() -> None:
    assert is_slow("tests/pipeline/test_mesh.py::test_any[1]")
    assert is_slow("tests/fuzz/test_fuzz.py::test_random_models_answer_as_eager[3]")
    assert not is_slow("tests/fuzz/test_fuzz.py::test_a_seed_draws_the_same_model")
    assert not is_slow("tests/pipeline/test_meshes.py::test_any")

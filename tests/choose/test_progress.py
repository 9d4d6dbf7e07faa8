"""A search keeps its budget; what it says on a terminal is tested in tests/test_logs.py."""

from __future__ import annotations

from intarsia.choose.race import Progress


def test_a_budget_is_spent() -> None:
    progress = Progress(10.0)
    progress.tell("building onnxruntime")  # nobody watches
    assert 9 < progress.left_s <= 10 and progress.spent_s >= 0

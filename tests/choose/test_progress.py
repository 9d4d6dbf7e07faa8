"""A search keeps its budget; what it says on a terminal is tested in tests/test_logs.py."""

from __future__ import annotations

from collections.abc import Callable

from intarsia.choose.race import Progress


def test_a_budget_is_spent(clock: Callable[[float], None]) -> None:
    progress = Progress(10.0)
    progress.tell("building onnxruntime")  # nobody watches
    clock(4)
    assert progress.left_s == 6 and progress.spent_s == 4

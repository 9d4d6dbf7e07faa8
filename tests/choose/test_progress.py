"""Progress is told on a terminal, and nowhere else."""

from __future__ import annotations

import io

from rich.console import Console

from intarsia.choose.progress import Progress


def _written(*, terminal: bool) -> str:
    file = io.StringIO()
    with Progress(10.0, Console(file=file, force_terminal=terminal, width=120)) as progress:
        progress.best("openvino", 0.0123)
        progress.tell("building onnxruntime")
        assert 9 < progress.left_s <= 10 and progress.spent_s >= 0
    return file.getvalue()


def test_a_terminal_is_told_what_runs_the_best_so_far_and_the_time_left() -> None:
    told = _written(terminal=True)
    assert "building onnxruntime; best so far openvino, 12.30 ms;" in told
    assert "s left (Ctrl-C takes the best)" in told


def test_a_pipe_is_told_nothing() -> None:
    assert _written(terminal=False) == ""

"""Charts by matplotlib, which is imported when a chart is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from intarsia.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Raise InputError for a file that no chart can be written to."""
    if path.suffix not in _FORMATS:
        raise InputError(f"{path} is no picture; give a name that ends in {', '.join(_FORMATS)}")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("pictures need matplotlib: pip install 'intarsia[charts]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure makes the same file, with text as text."""
    import matplotlib

    check_picture(path)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "intarsia"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)

"""Charts by matplotlib, which is imported only for a chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from intarsia.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Raise InputError if no chart can be written to this file."""
    if path.suffix not in _FORMATS:
        raise InputError(f"{path} is not a picture; give a name that ends in {', '.join(_FORMATS)}")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height are in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("pictures need matplotlib: pip install 'intarsia[charts]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure. Equal figures result in equal files; in SVG, text stays text."""
    import matplotlib

    check_picture(path)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "intarsia"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)

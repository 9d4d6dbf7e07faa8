"""The content of the pictures of a plan, as plain data; charts by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from intarsia.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The colours of engines, in the order of their first segments: Okabe and Ito's, for colour-blind readers.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00")
PYTORCH_COLOUR = "#8a8f98"


@dataclass(frozen=True)
class DrawnNode:
    """One node. `inputs` are positions in the list of nodes. An input of the model has no engine."""

    name: str
    op: str
    module: str = ""
    source: str = ""
    shape: str = ""
    engine: str = ""
    segment: int = -1
    inputs: tuple[int, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    work: float = 1.0  # an estimate, in the same unit for all nodes


@dataclass(frozen=True)
class DrawnLayers:
    """The layers of a segment's network, before and after rewriting, and the rewrites between."""

    converted: str
    rewritten: str
    rewrites: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrawnSegment:
    """One segment: its engine, its inputs and outputs, and its layers."""

    engine: str
    nodes: int
    operators: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0
    alone: bool = False
    seconds: float | None = None  # of a call, if measured
    layers: DrawnLayers | None = None  # if the engine reads layer networks


@dataclass(frozen=True)
class DrawnTrial:
    """One measured plan."""

    name: str
    seconds: float
    spread: float
    segments: int
    chosen: bool
    last_race: bool  # whether it was in the last race, whose plans are compared round by round


@dataclass(frozen=True)
class Drawing:
    """The content of a picture."""

    heading: str
    nodes: tuple[DrawnNode, ...]
    segments: tuple[DrawnSegment, ...]
    engine_seconds: Mapping[str, float] = field(default_factory=dict)  # measured seconds of a call
    timed_how: str = ""
    trials: tuple[DrawnTrial, ...] = ()
    measured_how: str = ""
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bodies: Mapping[str, Drawing] = field(default_factory=dict)  # bodies of control flow, by node and name

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines in use, in the order they first run."""
        return tuple(dict.fromkeys(segment.engine for segment in self.segments))

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each engine; PyTorch's is grey in every picture."""
        others = [engine for engine in self.engines if engine != "pytorch"]
        named = {engine: COLOURS[number % len(COLOURS)] for number, engine in enumerate(others)}
        return {engine: named.get(engine, PYTORCH_COLOUR) for engine in self.engines}


# Charts by matplotlib, which is imported only for a chart.


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

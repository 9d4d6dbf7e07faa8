"""The content of the pictures of a plan, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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

"""The error of a compiled module, segment by segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from intarsia.build.trial import case_of
from intarsia.capture.example import copied_call
from intarsia.capture.input import check_call
from intarsia.compare import disagreement, relative_error
from intarsia.errors import InputError
from intarsia.graph.nodes import module_path
from intarsia.logs import counted
from intarsia.lower.lowered import example_inputs
from intarsia.runtime.compiled import Compiled


@dataclass(frozen=True)
class SegmentError:
    """The error of one segment, relative to the largest value of each output.

    `own` is the error with inputs that PyTorch computed; `total` is the error with inputs from the segments
    before it.
    """

    number: int
    engine: str
    nodes: int
    begins: str  # its first node and the module of the node
    own: float
    total: float
    fault: str | None  # how its own outputs differ by more than rounding, or None


@dataclass(frozen=True)
class DiffReport:
    """The error of every segment on one call."""

    segments: tuple[SegmentError, ...]

    @property
    def equal(self) -> bool:
        """Whether every segment alone agrees with PyTorch to rounding."""
        return all(segment.fault is None for segment in self.segments)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"equal": self.equal, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{'':>3}  {'engine':16} {'nodes':>5}  {'own error':>9}  {'total':>9}  begins with"]
        for segment in self.segments:
            lines.append(
                f"{segment.number:>3}  {segment.engine:16} {segment.nodes:>5}  {segment.own:>9.1e}"
                f"  {segment.total:>9.1e}  {segment.begins}"
            )
            if segment.fault is not None:
                lines.append(f"     differs: {segment.fault}")
        return "\n".join(lines)


def diff(compiled: Compiled, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> DiffReport:
    """The error of each segment of a compiled module on a call, alone and accumulated from the start.

    >>> import intarsia
    >>> model, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    >>> print(diff(intarsia.compile(model, (x,), engines="onnxruntime", min_block_size=1), (x,)))
         engine           nodes  own error      total  begins with
      0  onnxruntime          1    ...e...  linear
    """
    check_call(compiled, args, kwargs)
    if not isinstance(compiled, Compiled):
        raise InputError(
            f"a {type(compiled).__name__} has no segments: it is not a model compiled as a whole"
        )
    if not compiled.stands_for_model:
        raise InputError("the model runs as it is, in PyTorch, so there are no segments")
    call = copied_call((args, kwargs or {}))
    compiled.check(compiled.flatten(*call))
    inputs = example_inputs(compiled.lowered, *call)
    placeholders = compiled.lowered.module.graph.find_nodes(op="placeholder")
    truth = dict(zip(placeholders, inputs, strict=True))
    ours = dict(truth)
    segments = []
    pairs = list(zip(compiled.inlay.pieces, compiled.inlay.steps, strict=True))
    for number, (piece, step) in enumerate(counted(pairs, len(pairs), "comparing the segments")):
        case = case_of(piece, truth)
        with torch.no_grad():
            alone = list(step.program(*case.inputs))
            reached = list(step.program(*(ours[node] for node in piece.inputs)))
        ours.update(zip(piece.outputs, reached, strict=True))
        if not piece.segment.nodes:  # it only returns sizes
            continue
        first = piece.segment.nodes[0]
        path = module_path(first)
        error = SegmentError(
            number,
            piece.segment.engine,
            len(piece.segment),
            f"{first.name} of {path}" if path else first.name,
            relative_error(alone, case.expected),
            relative_error(reached, case.expected),
            disagreement(alone, case.expected, case.rounding(0.0)),
        )
        segments.append(error)
    return DiffReport(tuple(segments))

"""Model and example inputs to `ExportedProgram`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from intarsia.errors import CaptureError

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a model as it behaves in evaluation, without gradients.

    >>> program = capture(nn.Linear(4, 2), (torch.ones(1, 4),))
    >>> [node.name for node in program.graph.nodes if node.op == "call_function"]
    ['linear']
    """
    if isinstance(model, ExportedProgram):
        return model
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a model must be an nn.Module, not a {type(model).__name__}")
    if not isinstance(args, list | tuple):
        raise CaptureError(f"args must be a tuple of inputs, not a {type(args).__name__}")
    try:
        with evaluating(model), torch.no_grad():
            return torch.export.export(
                model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; each submodule's own mode comes back after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _explain(model: nn.Module, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (
        f"{type(model).__name__} cannot be exported{_where(error)}: {type(error).__name__}: {reason}\n"
        'torch.compile(model, backend="intarsia") may still work: it compiles around what cannot be captured.'
    )


def _where(error: Exception) -> str:
    """` at file:line (in forward)` of the user's own code: the last frame outside torch."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    # Guards on data fail later, in torch's own code; the message then holds the user's frames.
    frames += [(file, int(line), name) for file, line, name in _FRAME.findall(str(error))]
    own = [f for f in frames if not _is_library(f[0])]
    if not own:
        return ""
    file, line, name = own[-1]
    return f" at {file}:{line} (in {name})"


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(part in file for part in ("/torch/", "intarsia/capture.py"))

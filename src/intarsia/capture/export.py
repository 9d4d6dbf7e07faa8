"""Model and example inputs to `ExportedProgram`."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.capture.export_context import (
    fast_paths_traced,
    kept_messages,
    keywords_named,
    short_stack_traces,
)
from intarsia.capture.input import honest_sizes
from intarsia.capture.output_objects import is_cache, opening
from intarsia.capture.protect import evaluating
from intarsia.errors import CaptureError
from intarsia.plain_tensors import is_opaque

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a model as it behaves in evaluation, without gradients; sizes of 0 and 1 are not assumed away.

    An ExportedProgram is copied (its weights are shared), since what follows edits the graph.

    >>> program = capture(nn.Linear(4, 2), (torch.ones(1, 4),))
    >>> [node.name for node in program.graph.nodes if node.op == "call_function"]
    ['linear']
    """
    if isinstance(model, ExportedProgram):
        return _copied(model)
    call = tuple(args), dict(kwargs or {})
    cache = next(filter(is_cache, pytree.tree_leaves(call, is_leaf=is_cache)), None)
    if cache is not None:
        raise CaptureError(
            f"{type(model).__name__} is given a {type(cache).__name__}, which it changes in Python, where no"
            " graph sees it"
        )
    if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in pytree.tree_leaves(call)):
        raise CaptureError(f"{type(model).__name__} takes a nested tensor, which no engine supports")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_nested:
            raise CaptureError(f"{name} is a nested tensor, which no engine supports")
        if is_opaque(tensor) and not tensor.is_meta:
            raise CaptureError(
                f"{name} is a {type(tensor).__name__}, a subclass of Tensor without"
                " `__tensor_flatten__`, so the tensors inside are not known"
            )
    if dynamic_shapes is not None:
        # A named Dim promises every size of its range to export, which fails if the model treats 1 by
        # itself; an unnamed one writes the exception down as a guard.
        for asked in (dynamic_shapes, _unnamed(dynamic_shapes)):
            try:
                with honest_sizes():
                    return _export(model, call, asked)
            except Exception:  # the plain export below succeeds, or says why not
                continue
    try:
        return _export(model, call, dynamic_shapes)
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error


def _export(
    model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], dynamic_shapes: Any
) -> ExportedProgram:
    with (
        evaluating(model),
        kept_messages(),
        fast_paths_traced(model),
        keywords_named(model, call[1] if dynamic_shapes is not None else {}),
        short_stack_traces(),
        opening(model, call),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        # Lists of the weights of every LSTM, too. A model that a run changes is found by running it.
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
        return torch.export.export(model, *call, dynamic_shapes=dynamic_shapes, strict=False)


def _unnamed(dynamic_shapes: Any) -> Any:
    """Each plain named `Dim` as a `Dim.DYNAMIC` of its range."""

    def unnamed(dim: Any) -> Any:
        low, high = getattr(dim, "min", None), getattr(dim, "max", None)
        if type(dim).__name__ != "Dim" or not isinstance(low, int):
            return dim
        return Dim.DYNAMIC(min=low, max=high)

    return pytree.tree_map(unnamed, dynamic_shapes)


def _copied(program: ExportedProgram) -> ExportedProgram:
    """The program with a graph of its own; weights and example inputs are shared."""
    graph = copy.deepcopy(program.graph)
    for old, new in zip(program.graph.nodes, graph.nodes, strict=True):
        new.name = old.name  # a copy avoids Python's own names, and the signature refers to these
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=dict(program.range_constraints),
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=dict(program.constants),
        verifiers=program.verifiers,
    )


def _explain(model: nn.Module, error: Exception) -> str:
    lines = [line.rstrip() for line in str(error).splitlines()]
    reason = next((line.strip() for line in lines if line.strip()), "")
    advice = [f"\n{line}" for line in _advice(lines)]
    return (
        f"{type(model).__name__} cannot be exported{_where(error)}: {type(error).__name__}: {reason}"
        f"{''.join(advice)}\n"
        'torch.compile(model, backend="intarsia") may still work: it compiles around what cannot be captured.'
    )


def _advice(lines: Sequence[str]) -> list[str]:
    """torch's messages about sizes: the violated constraints, and its suggested fixes."""
    violated = any(line.startswith("Constraints violated") for line in lines)
    shown: list[str] = []
    fixes = False
    for line in lines:
        fixes = (fixes or line.startswith("Suggested fixes")) and not line.startswith("The error above")
        if line.strip() and (fixes or (violated and line.startswith("  - "))):
            shown.append(line)
    return shown


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
    return file.startswith("<") or any(part in file for part in ("/torch/", "intarsia/capture/"))

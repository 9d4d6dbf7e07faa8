"""The function that Dynamo calls with every captured graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from intarsia.backend.dynamo_graph import inputs_of
from intarsia.backend.frozen import NOTE, autocast_now, needs_gradients
from intarsia.backend.graph_call import GraphCall, new_report
from intarsia.errors import InputError
from intarsia.options import CALL_ARGUMENTS, CompileOptions

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_ALTERNATIVES = {
    "reduce-overhead": "on a GPU the whole graph is one CUDA graph unless options={'cuda_graphs': False}",
    "max-autotune": "options={'partition': intarsia.Measured()} measures which engine is fastest",
    "max-autotune-no-cudagraphs": "options={'partition': intarsia.Measured(), 'cuda_graphs': False} does it",
    "lite": "options={'engines': 'pytorch'} leaves everything to PyTorch",
}


def intarsia_backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: `torch.compile(model, backend="intarsia", options={...})`.

    `options` are those of `intarsia.compile`. Parameters and buffers are constants of the program, which is
    compiled again when they change. Sizes that Dynamo made symbolic vary within the ranges of its guards. A
    graph that needs gradients, or cannot be compiled, runs as captured. A warning says so once, and
    `intarsia.backend.graph_call()` has a report for each graph.
    """
    compile_options = checked_options(mode, options)
    report = new_report(_where(module))
    dynamo_inputs = inputs_of(module, inputs)
    call = GraphCall(module, dynamo_inputs, compile_options, autocast_now(), report)
    reason = _left_to_pytorch(module, inputs)
    if reason is None:
        call.prepare(inputs)
    else:
        call.leave(reason)
    return call


def _left_to_pytorch(module: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    if needs_gradients(module, inputs):
        return NOTE
    if any(isinstance(x, torch._subclasses.FakeTensor) for x in inputs):
        return "its inputs have no values during compilation"
    return None


def _where(module: fx.GraphModule) -> str:
    """The line of the caller's code with the graph's first operation."""
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            frames = _FRAME.findall(str(node.meta.get("stack_trace", "")))
            own = [frame for frame in frames if "/torch/" not in frame[0]]
            if frames:
                file, line, name = (own or frames)[-1]
                return f"{file}:{line} (in {name})"
    return "an unknown place"


def checked_options(mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
    """The options, checked; InputError, with near names, for one that `compile` does not have.

    >>> checked_options(None, {"engine": "openvino"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    intarsia.errors.OptionError: ... has no option 'engine'; did you mean 'engines'?
    """
    if mode not in (None, "default"):
        alternative = f": {_ALTERNATIVES[mode]}" if mode in _ALTERNATIVES else ""
        raise InputError(f"mode={mode!r} is a setting of TorchInductor; pass options= instead{alternative}")
    for name in CALL_ARGUMENTS:  # Dynamo provides the graph, its inputs and the sizes that vary
        if name in (options or {}):
            raise InputError(
                f"option {name!r} comes from Dynamo; set the sizes that vary with torch.compile(dynamic=...)"
                " or torch._dynamo.mark_dynamic"
            )
    return CompileOptions.checked(options or {}, 'torch.compile(backend="intarsia")')

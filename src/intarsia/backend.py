"""The just-in-time door: `torch.compile(model, backend="intarsia")`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from intarsia.compiler import compile
from intarsia.errors import IntarsiaError


def intarsia_backend(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile what Dynamo captured; a graph that cannot be compiled runs as captured, with a warning.

    Sizes that Dynamo made symbolic are not compiled for: the graph runs in PyTorch then. Gradients are not
    given, so a graph that needs them is left to PyTorch too.
    """
    reason = _left_to_pytorch(inputs)
    if reason is None:
        try:
            example = [_real(value) for value in inputs]
            return compile(module, tuple(example), **{"fallback": "error", **options})
        except IntarsiaError as error:
            reason = str(error)
    import warnings

    warnings.warn(f"intarsia leaves this graph to PyTorch: {reason}", stacklevel=2)
    return module.forward


def _left_to_pytorch(inputs: Sequence[Any]) -> str | None:
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return "it needs gradients; call the model under torch.no_grad()"
    for value in inputs:
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return "it has symbolic sizes; use torch.compile(..., dynamic=False) or intarsia.compile"
    return None


def _real(value: Any) -> Any:
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    return value

"""The options of `torch.compile(..., options=...)`: those of `intarsia.compile`, checked by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from intarsia.errors import InputError, UnknownNameError
from intarsia.options import CALL_ARGUMENTS, CompileOptions

_ALTERNATIVES = {
    "reduce-overhead": "on a GPU the whole graph is one CUDA graph unless options={'cuda_graphs': False}",
    "max-autotune": "options={'partition': intarsia.Measured()} measures which engine is fastest",
    "max-autotune-no-cudagraphs": "options={'partition': intarsia.Measured(), 'cuda_graphs': False} does it",
    "lite": "options={'engines': 'pytorch'} leaves everything to PyTorch",
}


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


def without_name(options: CompileOptions, error: UnknownNameError) -> CompileOptions | None:
    """The options without a name that one graph does not have; None if it cannot be removed."""
    names = getattr(options.limits, error.option)
    if isinstance(names, str) or not isinstance(names, Sequence) or error.name not in names:
        return None
    others: Any = [name for name in names if name is not error.name and name != error.name]
    return replace(options, limits=replace(options.limits, **{error.option: others}))

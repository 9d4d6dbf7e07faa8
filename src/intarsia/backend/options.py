"""What `torch.compile(..., options=...)` may hold: the options of `intarsia.compile`, checked by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from intarsia.errors import InputError, UnknownNameError
from intarsia.options import CALL_ARGUMENTS, CompileOptions

_INSTEAD = {
    "reduce-overhead": "on a GPU the whole graph is one CUDA graph unless options={'cuda_graphs': False}",
    "max-autotune": "options={'partition': intarsia.Measured()} measures who runs what best",
    "max-autotune-no-cudagraphs": "options={'partition': intarsia.Measured(), 'cuda_graphs': False} does it",
    "lite": "options={'engines': 'pytorch'} leaves everything to PyTorch",
}


def checked_options(mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
    """The options, if each is one of `compile`'s; InputError, with near names, if not.

    >>> checked_options(None, {"engine": "openvino"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    intarsia.errors.OptionError: ... has no option 'engine'; did you mean 'engines'?
    """
    if mode not in (None, "default"):
        instead = f": {_INSTEAD[mode]}" if mode in _INSTEAD else ""
        raise InputError(f"mode={mode!r} is a setting of TorchInductor; pass options= instead{instead}")
    for name in CALL_ARGUMENTS:  # Dynamo knows the graph, its inputs and which of their sizes vary
        if name in (options or {}):
            raise InputError(
                f"option {name!r} comes from Dynamo; set the sizes that vary with torch.compile(dynamic=...)"
                " or torch._dynamo.mark_dynamic"
            )
    return CompileOptions.checked(options or {}, 'torch.compile(backend="intarsia")')


def without_name(options: CompileOptions, error: UnknownNameError) -> CompileOptions | None:
    """The options without a name that one graph does not have; None where it cannot be taken out."""
    names = getattr(options.limits, error.option)
    if isinstance(names, str) or not isinstance(names, Sequence) or error.name not in names:
        return None
    others: Any = [name for name in names if name is not error.name and name != error.name]
    return replace(options, limits=replace(options.limits, **{error.option: others}))

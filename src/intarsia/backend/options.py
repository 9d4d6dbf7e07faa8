"""What `torch.compile(..., options=...)` may hold: the options of `intarsia.compile`, checked by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from intarsia.compile_options import check_values
from intarsia.compiler import compile
from intarsia.errors import InputError, UnknownNameError
from intarsia.partition.options import PartitionChoices

# What Dynamo itself tells: the graph, its inputs and which of their sizes vary.
_TOLD_BY_DYNAMO = ("model", "args", "kwargs", "dynamic_shapes", "choices")
_INSTEAD = {
    "reduce-overhead": "on a GPU the whole graph is one CUDA graph unless options={'cuda_graphs': False}",
    "max-autotune": "options={'partition': intarsia.Measured()} measures who runs what best",
    "max-autotune-no-cudagraphs": "options={'partition': intarsia.Measured(), 'cuda_graphs': False} does it",
    "lite": "options={'engines': 'pytorch'} leaves everything to PyTorch",
}


def known_options() -> list[str]:
    """The names that `options` may hold.

    >>> "engines" in known_options(), "min_block_size" in known_options(), "model" in known_options()
    (True, True, False)
    """
    own = [name for name in inspect.signature(compile).parameters if name not in _TOLD_BY_DYNAMO]
    return [*own, *PartitionChoices.__annotations__]


def checked_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options, if each is one of `compile`'s; InputError, with near names, if not.

    >>> checked_options(None, {"engine": "openvino"})
    Traceback (most recent call last):
    ...
    intarsia.errors.InputError: there is no option 'engine'; near is 'engines'
    """
    if mode not in (None, "default"):
        instead = f": {_INSTEAD[mode]}" if mode in _INSTEAD else ""
        raise InputError(f"mode={mode!r} is a setting of TorchInductor; give options= instead{instead}")
    known = known_options()
    for name in options or {}:
        if name in ("args", "kwargs", "dynamic_shapes", "model"):
            raise InputError(
                f"option {name!r} is told by Dynamo; say which sizes vary by torch.compile(dynamic=...)"
                " or torch._dynamo.mark_dynamic"
            )
        if name not in known:
            near = get_close_matches(str(name), known, n=3, cutoff=0.5)
            told = f"; near is {', '.join(map(repr, near))}" if near else f"; known are {', '.join(known)}"
            raise InputError(f"there is no option {name!r}{told}")
    check_values(options or {})
    return dict(options or {})


def without_name(options: Mapping[str, Any], error: UnknownNameError) -> dict[str, Any] | None:
    """The options without a name that one graph does not have; None where it cannot be taken out."""
    together = options.get("options")
    held = options.get(error.option) if together is None else getattr(together, error.option)
    if isinstance(held, str) or not isinstance(held, Sequence) or error.name not in held:
        return None
    kept = [name for name in held if name is not error.name and name != error.name]
    if together is None:
        return {**options, error.option: kept}
    return {**options, "options": replace(together, **{error.option: kept})}

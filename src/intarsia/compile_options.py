"""Options of `compile` that are given to another function, checked by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from intarsia.capture.input import further_calls
from intarsia.choose.wishes import wishes_of
from intarsia.compiler import compile
from intarsia.engines import resolve_engines
from intarsia.errors import InputError
from intarsia.partition.options import PartitionChoices

_VALUES = [name for name in inspect.signature(wishes_of).parameters if name not in ("choices", "began")]
_OURS = ("model", "args", "kwargs", "dynamic_shapes", "fallback", "choices")


def checked(options: Mapping[str, Any], function: str) -> dict[str, Any]:
    """The options, if each is one of `compile`'s; InputError, with near names, if not.

    >>> checked({"engine": "openvino"}, "tune")
    Traceback (most recent call last):
    ...
    intarsia.errors.InputError: tune has no option 'engine'; near is 'engines'
    """
    own = [name for name in inspect.signature(compile).parameters if name not in _OURS]
    known = [*own, *PartitionChoices.__annotations__]
    for name in options:
        if name in _OURS:
            raise InputError(f"{function} finds {name} by itself; it is no option")
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.5)
            raise InputError(
                f"{function} has no option {name!r}" + (f"; near is {near[0]!r}" if near else "")
            )
    check_values(options)
    return dict(options)


def check_values(options: Mapping[str, Any]) -> None:
    """Raise what `compile` would for a value that it does not take."""
    choices = {name: value for name, value in options.items() if name in PartitionChoices.__annotations__}
    own = {name: value for name, value in options.items() if name in _VALUES}
    wishes_of(**own, choices=choices)  # type: ignore[arg-type]
    further_calls(options.get("examples", ()), {})
    if options.get("engines") is not None:
        resolve_engines(options["engines"])

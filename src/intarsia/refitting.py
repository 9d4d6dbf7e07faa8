"""How a loaded module gets new weights: the top of the package says who does it, the runtime calls it.

A process that only loads and runs a module imports neither the compiler nor converters nor patterns. New
weights need all of them. The runtime lies below the compiler and cannot import it, so `intarsia/__init__.py`,
which every process runs, sets a function here that imports the compiler when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_makers: list[Callable[[Any, Any], None]] = []


def set_maker(maker: Callable[[Any, Any], None]) -> None:
    """Let `maker(loaded, captured)` make loaded modules refittable from now on."""
    _makers[:] = [maker]


def make_refittable(loaded: Any, captured: Any) -> None:
    """Let a loaded module take other weights, by the program that its file holds."""
    (maker,) = _makers
    maker(loaded, captured)

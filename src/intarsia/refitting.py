"""Refit of loaded modules: a function that the top of the package sets and the runtime calls.

A process that only loads and runs a module imports neither the compiler nor converters nor patterns, and a
refit needs all of them. The runtime is below the compiler and cannot import it. So `intarsia/__init__.py`,
which every process runs, sets a function that imports the compiler at its first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_makers: list[Callable[[Any, Any], None]] = []


def set_maker(maker: Callable[[Any, Any], None]) -> None:
    """Set the function that makes loaded modules refittable."""
    _makers[:] = [maker]


def make_refittable(loaded: Any, captured: Any) -> None:
    """Make a loaded module refittable, by the program in its file."""
    (maker,) = _makers
    maker(loaded, captured)

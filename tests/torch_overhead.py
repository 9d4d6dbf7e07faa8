"""Takes work out of torch that changes no result and is a tenth of what the tests cost.

All of it stands on names private to torch. Where one is gone, the tests run as they would without.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._export import utils
from torch.utils import _traceback


def spare() -> None:
    """Call once, before anything is exported."""
    _register_kernels_without_annotations()
    _make_operators_once()
    _read_lines_once()


def forget_operators() -> None:
    """Call between tests: each mode that export enters goes through all operators that were ever called."""
    if hasattr(torch._ops, "reset_cached_ops"):
        for operator in list(torch._ops.get_cached_ops()):  # threads of a test may add to them
            operator._dispatch_cache.clear()
        torch._ops.reset_cached_ops()


def _register_kernels_without_annotations() -> None:
    """`py_impl`, called 5,700 times by each `run_decompositions`, mostly evaluates its own annotations."""
    original = torch._ops.OperatorBase.py_impl

    def py_impl(self: Any, k: Any) -> Any:
        if type(k) is not DispatchKey or k == DispatchKey.Python or k in self.py_kernels:
            return original(self, k)

        def register(fn: Any) -> Any:
            self.py_kernels[k] = fn
            self._dispatch_cache.clear()
            return fn

        return register

    torch._ops.OperatorBase.py_impl = py_impl  # type: ignore[method-assign]


def _make_operators_once() -> None:
    """`run_decompositions` asks for every composite operator by name, once for each of thirty namespaces.

    What is asked for stays in `torch.ops`, so once is enough until the dispatcher knows other operators.
    """
    make: Callable[[], None] | None = getattr(utils, "_materialize_cpp_cia_ops", None)
    if make is None:
        return
    made: list[Any] = [None]

    def make_once() -> None:
        names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if names != made[0]:
            make()
            made[0] = names

    utils._materialize_cpp_cia_ops = make_once


def _read_lines_once() -> None:
    """Each node of an exported graph is given the stack it was made in, under pytest a hundred frames."""
    if not hasattr(_traceback, "_extract_symbolized_tb"):
        return

    @functools.lru_cache(maxsize=10_000)
    def frame(filename: str, line: int, name: str) -> traceback.FrameSummary:
        return traceback.FrameSummary(filename, line, name)

    def summary(tb: Sequence[dict[str, Any]], skip: int) -> traceback.StackSummary:
        stack = traceback.StackSummary()
        for f in reversed(tb[skip:]):
            # Lines of generated code may be others the next time.
            make = traceback.FrameSummary if f["filename"].startswith("<") else frame
            stack.append(make(f["filename"], f["line"], f["name"]))
        return stack

    _traceback._extract_symbolized_tb = summary

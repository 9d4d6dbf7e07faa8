"""Takes work out of torch that changes no result and is a tenth of what the tests cost.

Both functions stand on names private to torch. Where one is gone, the tests run as they would without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._export import utils


def spare() -> None:
    """Call once, before anything is exported."""
    _register_kernels_without_annotations()
    _make_operators_once()


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

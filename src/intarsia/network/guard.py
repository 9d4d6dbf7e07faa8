"""The network that functionals of this thread add their layers to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from intarsia.errors import NetworkError

if TYPE_CHECKING:
    from intarsia.network.network import Network

_guards = threading.local()


class _Calls(threading.local):
    made: list[ir.Node] | None = None
    net: Network | None = None


calls = _Calls()  # the layers made by the functional that runs now in this thread, and their network


@contextlib.contextmanager
def net_guard(net: Network) -> Iterator[Network]:
    """While open, functionals of this thread add their layers to `net`."""
    stack: list[Network] = _guards.__dict__.setdefault("stack", [])
    stack.append(net)
    try:
        yield net
    finally:
        stack.pop()


def default_net(*tensors: Any) -> Network:
    """The network under guard; without a guard, the one the given tensors belong to."""
    stack: list[Network] = _guards.__dict__.get("stack", [])
    if stack:
        return stack[-1]
    from intarsia.network.tensor import Tensor

    for tensor in tensors:
        if isinstance(tensor, Tensor):
            return tensor.network
    raise NetworkError("no network is under guard; open one with `with net_guard(net):`")


def network_of(graph: ir.Graph) -> Network:
    """The network a raw graph belongs to: most often the one under guard."""
    stack: list[Network] | None = _guards.__dict__.get("stack")
    if stack and stack[-1].graph is graph:
        return stack[-1]
    from intarsia.network.network import Network

    return Network.of(graph)

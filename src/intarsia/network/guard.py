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


class _Here(threading.local):
    net: Network | None = None  # under guard


here = _Here()  # of this thread


@contextlib.contextmanager
def net_guard(net: Network) -> Iterator[Network]:
    """While open, functionals of this thread add their layers to `net`."""
    outer, here.net = here.net, net
    try:
        yield net
    finally:
        here.net = outer


def default_net(*tensors: Any) -> Network:
    """The network under guard; without a guard, the one the given tensors belong to."""
    net = here.net
    if net is not None:
        return net
    from intarsia.network.tensor import Tensor

    for tensor in tensors:
        if isinstance(tensor, Tensor):
            return tensor.network
    raise NetworkError("no network is under guard; open one with `with net_guard(net):`")


def network_of(graph: ir.Graph) -> Network:
    """The network a raw graph belongs to: most often the one under guard."""
    net = here.net
    if net is not None and net.graph is graph:
        return net
    from intarsia.network.network import Network

    return Network.of(graph)

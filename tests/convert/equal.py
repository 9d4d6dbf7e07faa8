"""A function of tensors, converted once, answers as eager does on every engine and at every shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.convert import drivers
from tests.convert.programs import program_of

from intarsia.convert import convert
from intarsia.errors import GuardError
from intarsia.network import Network

Inputs = Sequence[torch.Tensor]


def assert_equal(
    function: Callable[..., Any],
    *calls: Inputs,
    dynamic: tuple[Any, ...] | None = None,
    engines: Sequence[str] = drivers.ENGINES,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    left: Sequence[str] = (),
) -> Network:
    """Convert at the first call's shapes, run every call; the network, for a look at its layers.

    The engines in `left` may leave a call to PyTorch by a guard.
    """
    with torch.no_grad():
        module = program_of(function, *calls[0], dynamic=dynamic)
    net = convert(module)
    for engine in engines:
        program = drivers.build(engine, net)
        for inputs in calls:
            with torch.no_grad():
                wanted = function(*inputs)
            wanted = wanted if isinstance(wanted, tuple | list) else (wanted,)
            try:
                made = program(*inputs)
            except GuardError:
                assert engine in left
                continue
            assert len(made) == len(wanted)
            for have, want in zip(made, wanted, strict=True):
                assert have.dtype == want.dtype and have.shape == want.shape, engine
                torch.testing.assert_close(have, want, rtol=rtol, atol=atol, equal_nan=True, msg=None)
    return net


def kinds(net: Network) -> list[str]:
    """The operators of a network, in order."""
    return [layer.kind for layer in net.get_layers()]

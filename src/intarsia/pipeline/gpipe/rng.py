"""Random numbers that come out the same when a task runs again, also while other stages draw theirs.

torch has one generator per device and process. Stages that run at the same time on one device would
draw from it in an order nobody knows, and a recomputation could not draw the same numbers. So every
task draws from generators of its own, seeded by (the caller's generator, micro-batch, stage).
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Held while a default generator stands in for a task's own.
_lock = threading.Lock()


# The states of default generators.
States = dict[torch.device, Tensor]


@contextmanager
def noted_draws(devices: Iterable[torch.device], drawn: States) -> Iterator[None]:
    """Note in `drawn` the state that every default generator drawn from meanwhile had before."""
    before = {device: _default_generator(device).get_state() for device in devices}
    yield
    for device, state in before.items():
        if not torch.equal(state, _default_generator(device).get_state()):
            drawn[device] = state


class Seeds:
    """The seeds of one run's tasks, from the state the caller's generator has at its start.

    The caller's generator moves on by one draw if, and only if, a task drew anything.
    """

    def __init__(self) -> None:
        self.before = torch.get_rng_state()
        peek = torch.Generator()
        peek.set_state(self.before)
        self.base = _draw(peek)
        self.used = False

    def seed(self, micro_batch: int, stage: int) -> int:
        """The seed of one task."""
        digest = hashlib.blake2b(struct.pack("<qqq", self.base, micro_batch, stage), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def finish(self) -> bool:
        """Move the caller's generator on; false if somebody else has drawn from it meanwhile."""
        untouched = torch.equal(self.before, torch.get_rng_state())
        if self.used:
            _draw(torch.default_generator)
        return untouched


def _draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**62, (), generator=generator, device="cpu"))


class TaskRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every random operation of a task the task's own generator.

    A generator starts from its seed on the devices that stages share, or where a default generator once
    stood (`states`), so that numbers drawn then are drawn again. Other devices keep their default one.
    Default generators are never left changed, so it does not matter what other threads do meanwhile.
    """

    def __init__(
        self, seed: int = 0, shared: frozenset[torch.device] = frozenset(), states: States | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.shared = shared
        self.drew: set[torch.device] = set()
        self._generators: dict[torch.device, torch.Generator] = {}
        for device, state in (states or {}).items():
            self._generators[device] = torch.Generator(device)
            self._generators[device].set_state(state)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper that keeps dynamo out: it imports dynamo, seconds in the first run."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        place = next((i for i, argument in enumerate(arguments) if argument.name == "generator"), None)
        given = kwargs.get("generator")
        if given is None and place is not None and place < len(args):
            given = args[place]
        if given is not None:  # the model's own generator
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if device not in self.shared and device not in self._generators:
            self.drew.add(device)
            return func(*args, **kwargs)
        generator = self._generator(device)
        start = generator.get_state()
        if place is not None and (place >= len(args) or arguments[place].kwarg_only):
            answer = func(*args, **dict(kwargs, generator=generator))
        else:
            with _lock:
                default = _default_generator(device)
                before = default.get_state()
                default.set_state(start)
                try:
                    answer = func(*args, **kwargs)
                finally:
                    generator.set_state(default.get_state())
                    default.set_state(before)
        # Attention may draw, and does not without dropout: a stage is random only if a generator has moved.
        if device not in self.drew and not torch.equal(start, generator.get_state()):
            self.drew.add(device)
        return answer

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device an operation draws on: the one it names, or that of its first tensor."""
    named = kwargs.get("device")
    if named is not None:
        device = torch.device(named)
    else:
        values = (*args, *kwargs.values())
        device = next((x.device for x in values if isinstance(x, Tensor)), torch.device("cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator

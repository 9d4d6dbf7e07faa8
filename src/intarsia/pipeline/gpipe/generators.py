"""torch's default generators: one thread at a time may seed them, and restores them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Locks:
    """A lock for each device's generator, which all threads of a process share.

    Code that holds a lock gets new locks for the code that it calls. Otherwise, a layer that contains a
    pipeline would deadlock: the pipeline's threads would wait for the layer, and the layer for the threads.
    """

    own: dict[torch.device, threading.Lock] = field(default_factory=dict)
    outer: _Locks | None = None

    def of(self, device: torch.device) -> threading.Lock:
        if self.outer is None or device in self.own:
            return self.own.setdefault(device, threading.Lock())
        return self.outer.of(device)


_locks: ContextVar[_Locks] = ContextVar("generator locks", default=_Locks())  # noqa: B039  (meant for all)


@contextmanager
def borrowed_generators(devices: Collection[torch.device]) -> Iterator[list[torch.Generator]]:
    """The default generators of devices, for one thread alone; their states are restored at the end."""
    locks = _locks.get()
    ordered = sorted(devices, key=str)
    with ExitStack() as stack:
        for device in ordered:
            stack.enter_context(locks.of(device))
        generators = [default_generator(device) for device in ordered]
        states = [generator.get_state() for generator in generators]
        token = _locks.set(_Locks({device: threading.Lock() for device in ordered}, locks))
        try:
            yield generators
        finally:
            _locks.reset(token)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def seeded(seed: int, devices: Collection[torch.device]) -> Iterator[None]:
    """Borrow the generators of devices, and seed them."""
    with borrowed_generators(devices) as generators:
        for generator in generators:
            generator.manual_seed(seed)
        yield


def default_generator(device: torch.device) -> torch.Generator:
    """torch's default generator of a device."""
    if device.type == "cuda":
        # `current_device` initializes CUDA, which creates the generators.
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


_changes = 0  # how often pipelines have changed the state of the CPU's generator


@contextmanager
def changing_generator() -> Iterator[None]:
    """The context of a pipeline's change to the CPU's generator."""
    global _changes
    with _locks.get().of(CPU):
        _changes += 1
        yield


@dataclass(frozen=True)
class GeneratorSnapshot:
    """The state of the CPU's generator, and the number of changes by pipelines."""

    state: Tensor
    changes: int

    @staticmethod
    def take() -> GeneratorSnapshot:
        """The present state."""
        with _locks.get().of(CPU):
            return GeneratorSnapshot(torch.get_rng_state(), _changes)

    def others_drew(self) -> bool:
        """Whether other code drew from the generator. False if another pipeline changed it: then unknown."""
        now = GeneratorSnapshot.take()
        return now.changes == self.changes and not torch.equal(now.state, self.state)


def generator_locks() -> object:
    """The identity of the locks in use: it differs inside `borrowed_generators`."""
    return _locks.get()

"""torch's default generators: one thread at a time may seed them, and puts them back."""

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
    """A lock for each device's generator, of which a process has one for all its threads.

    Whoever holds some lends what it calls locks of its own for them: a layer may contain a pipeline, whose
    threads would wait for the layer, which waits for them.
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
    """The default generators of devices, which nobody else uses meanwhile; put back afterwards."""
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
    """Borrow the generators of devices, freshly seeded."""
    with borrowed_generators(devices) as generators:
        for generator in generators:
            generator.manual_seed(seed)
        yield


def default_generator(device: torch.device) -> torch.Generator:
    """torch's generator of a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index  # makes the generators
        return torch.cuda.default_generators[index]
    return torch.default_generator


_moves = 0  # of the CPU's generator by pipelines


@contextmanager
def moving_generator() -> Iterator[None]:
    """Around a move of the CPU's generator."""
    global _moves
    with _locks.get().of(CPU):
        _moves += 1
        yield


@dataclass(frozen=True)
class GeneratorMark:
    """Where the CPU's generator stood, and how often pipelines had moved it."""

    state: Tensor
    moves: int

    @staticmethod
    def take() -> GeneratorMark:
        """The present."""
        with _locks.get().of(CPU):
            return GeneratorMark(torch.get_rng_state(), _moves)

    def others_drew(self) -> bool:
        """Whether somebody drew numbers without a key; unknown where another pipeline began or ended."""
        now = GeneratorMark.take()
        return now.moves == self.moves and not torch.equal(now.state, self.state)


def holding() -> object:
    """The identity of one hold of the generators; None without one."""
    return _locks.get()

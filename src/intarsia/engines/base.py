"""What an engine is: something that turns a piece of a model into a program."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import fx

from intarsia.network import Network

# Tensors in, tensors out, in the order of the piece's inputs and outputs; safe to call from many threads.
Program = Callable[..., tuple[torch.Tensor, ...]]


class Engine(abc.ABC):
    """Runs pieces of a model. Options are fields of the subclass; `name` is how plans call it."""

    name: ClassVar[str]

    @abc.abstractmethod
    def unavailable(self) -> str | None:
        """Why this engine cannot be used on this machine, with what to install; None if it can."""

    def runs_on(self, device: str) -> bool:
        """Whether it takes tensors of this kind of device."""
        return device == "cpu"

    def key(self) -> str:
        """What makes two engines of this class build different programs."""
        return repr(self)


class NetworkEngine(Engine):
    """An engine that reads layer networks."""

    @abc.abstractmethod
    def probe(self, net: Network) -> str | None:
        """Why this engine refuses the layers of a small network; None if it takes them."""

    @abc.abstractmethod
    def build(self, net: Network) -> Program:
        """The program that runs a network; EngineError if the engine fails."""


class GraphEngine(Engine):
    """An engine that reads FX graphs of ATen operators."""

    @abc.abstractmethod
    def build(self, module: fx.GraphModule) -> Program:
        """The program that runs a graph."""

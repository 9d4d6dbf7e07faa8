"""The contract of engines. An engine turns a piece of a model into a program."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import fx

from intarsia.cache.machine import package_version
from intarsia.engines.guards.inputs import input_check, is_known_to_hold, sentence_about
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.ports import Ports
from intarsia.errors import EngineError, GuardError, warn

if TYPE_CHECKING:
    from intarsia.network import Network


# Tensors in, tensors out, in the order of the piece's inputs and outputs; safe to call from many threads.
# Results lie in memory of their own, which no later call writes to.
Program = Callable[..., tuple[torch.Tensor, ...]]


class GuardedProgram:
    """A program that detects calls that its engine would answer differently from PyTorch.

    `otherwise` answers them; without it, such a call raises GuardError.
    """

    otherwise: Program | None = None
    _told = False

    def __init__(self, ports: Ports, checks: Checks) -> None:
        self._names = [port.name for port in ports.inputs]
        self._computed, self._limits = checks.computed, checks.limits
        self._given = {
            place: [(guard, input_check(guard)) for guard in checks.inputs[name]]
            for place, name in enumerate(self._names)
            if name in checks.inputs
        }

    @property
    def guards(self) -> list[str]:
        """The conditions under which the engine answers, as text."""
        return [str(g) for checks in self._given.values() for g, _ in checks] + [
            str(g) for g in self._computed
        ]

    def _broken_input(self, array_at: Callable[[int], Any], tensors: Sequence[Any]) -> str | None:
        """The first input that a guard refuses, in a sentence; None for inputs that the engine may have."""
        for place, checks in self._given.items():
            for guard, holds in checks:
                if not is_known_to_hold(guard, tensors[place]) and not holds(array_at(place)):
                    return sentence_about([guard], self._names, tensors)
        return None

    def _broken(self, numbers: Any, tensors: Sequence[Any]) -> str | None:
        """The same of the numbers that the engine computed for guards of other tensors."""
        held = numbers <= self._limits
        if held.all():
            return None
        broken = [guard for guard, fine in zip(self._computed, held, strict=True) if not fine]
        return sentence_about(broken, self._names, tensors)

    def unguarded(self) -> Program:
        """The program without guards, for timing only."""
        self.otherwise, self._told = _no_answer, True
        return self  # type: ignore[return-value]  # subclasses are called

    def _left(self, inputs: tuple[torch.Tensor, ...], reason: str) -> tuple[torch.Tensor, ...]:
        if self.otherwise is None:
            raise GuardError(reason)
        if not self._told:
            self._told = True
            warn(f"PyTorch runs this call in place of an engine: {reason}")
        return self.otherwise(*inputs)


def _no_answer(*_: Any) -> tuple[torch.Tensor, ...]:
    return ()


@dataclass(frozen=True)
class Workload:
    """The workload of a search for the fastest plan. Engines read it to propose options (`variants`)."""

    module: fx.GraphModule  # the whole model, lowered
    on_gpu: bool = False
    objective: Literal["latency", "throughput"] = "latency"
    thorough: bool = False  # the user gave a time budget: options that rarely pay are measured too


class Engine(abc.ABC):
    """Runs pieces of a model. Options are fields of the subclass; `name` is its name in plans.

    An engine declares all its properties here; nothing outside `intarsia.engines` names an engine. Methods
    that are not abstract have a default that is right for most engines. A compile calls, in this order:

    1. `unavailable`, once; `is_default` or `runs_on`, if the user names no engine.
    2. `probe_all` (or `refusal`) with every operator of the model, as small networks.
    3. `variants` and `for_objective`, if plans are measured.
    4. `build` for every piece. The program runs on the examples, and `intarsia.compare.disagreement` compares
       its answers with PyTorch's. For shorter arithmetic, `coarsest` is the allowed rounding.
    5. `pack` when the module is saved, and `unpack` when it is loaded.

    If a method raises an error, only its piece is affected. It goes to another engine, and the plan has the
    reason.
    """

    name: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ()  # modules that do its work; their versions are part of its own
    capturable: ClassVar[bool] = False  # whether a CUDA graph of torch's may hold its programs
    slow_to_build: ClassVar[bool] = False  # so that a piece that fails leaves whole, and is not bisected
    arithmetic: ClassVar[str] = "fp32"  # others ("bf16", "int8" ...) are used within a tolerance, or by name
    based_on: ClassVar[str | None] = None  # of one in shorter arithmetic: the name of the exact engine
    quantized_only: ClassVar[bool] = False  # of use only for models that were quantised beforehand

    @abc.abstractmethod
    def unavailable(self) -> str | None:
        """Why this engine cannot be used on this machine, with what to install; None if it can."""

    @classmethod
    def is_default(cls, device: str) -> bool:
        """Whether it is used for a model on this kind of device if the user names no engine."""
        return device == "cpu" and cls.arithmetic == "fp32"

    def runs_on(self, device: str) -> bool:
        """Whether it takes tensors of this kind of device."""
        return device == "cpu"

    @property
    def coarsest(self) -> float:
        """The rounding of this engine's arithmetic if it is shorter than the model's own; otherwise 0."""
        return 0.0

    @property
    def family(self) -> str:
        """The name of the engine that takes the same layers: its own, unless it is based on another."""
        return self.based_on or self.name

    @property
    def is_exact(self) -> bool:
        """Whether this engine computes in the model's own arithmetic, whatever its options."""
        return self.arithmetic == "fp32"

    def key(self) -> str:
        """The options that make engines of this class build different programs."""
        return repr(self)

    def version(self) -> str:
        """The versions of the package that defines this engine and of its `libraries`.

        Everything that is kept on disk holds for one version only: packed programs, cached builds, measured
        times. An engine whose programs depend on more, such as a driver, adds that here.
        """
        modules = dict.fromkeys((type(self).__module__.partition(".")[0], *self.libraries))
        return ", ".join(f"{name} {package_version(name)}" for name in modules)

    def for_objective(self, objective: str) -> Engine:
        """This engine with the options that start a search for "latency" or "throughput"."""
        return self

    def variants(self, workload: Workload) -> list[tuple[str, Engine]]:
        """The same engine with other options that may be faster for this model, each with a short label.

        Options that the user gave stay: only options with their default value are varied.
        """
        return []

    def may_pay(self, model: object) -> bool:
        """For an engine that is not used by default: whether the default search tries it.

        It is asked before the model is captured, so that an engine that cannot win costs nothing.
        """
        return False

    def is_known_to_pay(self, workload: Workload) -> bool:
        """For an engine that is slow to build: whether it is tried even without a budget."""
        return False


@dataclass(frozen=True)
class WeightFile:
    """A file with the weights of a network. An engine may read them there instead of holding a copy."""

    path: str
    places: Mapping[str, int]  # where a weight begins, by name; one that lies there otherwise is left out


@dataclass(frozen=True)
class GrowingFile(WeightFile):
    """Such a file while it is written."""

    append: Callable[[bytes], int]  # puts more into the file; where that begins, at a multiple of 64


@dataclass(frozen=True)
class Packed:
    """A network in an engine's own form, valid for one version of the engine and one kind of machine."""

    blob: bytes
    about: Mapping[str, Any]  # what its program takes, gives and checks, in plain values


Arrays = dict[str, Any]  # numpy arrays by name


class RuntimeFile(Protocol):
    """A model file that an engine's own runtime has loaded."""

    inputs: list[str]

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs as arrays, in the order of the file."""
        ...

    def run_inside(self, values: Mapping[str, Any]) -> Arrays:
        """All intermediate values, by their names in the file."""
        ...


class NetworkEngine(Engine):
    """An engine that reads layer networks."""

    @abc.abstractmethod
    def probe(self, net: Network) -> str | None:
        """Why this engine refuses the layers of a small network; None if it accepts them."""

    takes_bodies: ClassVar[bool] = False  # layers that hold networks: `If` and `Loop`
    multiplies_integers: ClassVar[bool] = False  # 8-bit activations by 8-bit weights, without saturation
    divides_exactly: ClassVar[bool] = True  # and does not multiply by reciprocals, which rounds twice

    def probe_all(self, nets: Sequence[Network]) -> list[str | None]:
        """The result of `probe` for each network. An engine may compute many at once, which is faster."""
        return [self.probe(net) for net in nets]

    @abc.abstractmethod
    def build(self, net: Network) -> Program:
        """Build the program that runs a network; EngineError if the engine fails."""

    def fails_on_empty(self, net: Network) -> str | None:
        """Why a program of a network whose sizes vary must never get an empty tensor; None if it may.

        PyTorch answers such calls.
        """
        return None

    def patterns(self) -> Collection[str]:
        """The groups of shipped rewriting patterns that may make this engine faster (`Fusion.group`).

        "onnx": patterns that make layers of ONNX's own operators; `probe` is asked about each.
        "com.microsoft": patterns that make layers of that domain.
        "onednn": patterns that choose among the kernels of oneDNN.
        """
        return ("onnx",)

    file_suffix: ClassVar[str] = ""  # of the files that `write` makes and `open` reads; empty for none

    def write(self, net: Network, path: Path) -> Mapping[str, str]:
        """Write the network as a file that the engine's own runtime loads, weights in it and no guards.

        Returns the settings with which the runtime must load the file to answer as `build` does.
        """
        raise EngineError(f"{self.name} has no files of its own")

    def open(self, path: Path) -> RuntimeFile:
        """A file of this kind, or an ONNX file, loaded by the engine's own runtime.

        EngineError if it refuses the file.
        """
        raise EngineError(f"{self.name} has no files of its own")

    def pack(self, net: Network, file: GrowingFile) -> Packed | None:
        """The network in the engine's own form, weights left in the file; None if it has no such form."""
        return None

    def unpack(
        self,
        blob: memoryview,
        about: Mapping[str, Any],
        file: WeightFile,
        weights: Mapping[str, torch.Tensor],
    ) -> Program:
        """The program of a packed network; EngineError if the engine refuses it.

        Its weights are tensors in memory, and in the file, if the engine can read them there.
        """
        raise EngineError(f"{self.name} does not define a form for networks")


class GraphEngine(Engine):
    """An engine that reads FX graphs of ATen operators."""

    def refusal(self, node: fx.Node) -> str | None:
        """Why this engine refuses a node; None if it accepts it."""
        return None

    @abc.abstractmethod
    def build(self, module: fx.GraphModule) -> Program:
        """Build the program that runs a graph; EngineError if the engine fails."""

    runs_packages: ClassVar[bool] = False  # machine code of its own making, where it may build nothing

    def package(self, module: fx.GraphModule) -> bytes:
        """The program as machine code in a file, weights included; EngineError if it cannot be."""
        raise EngineError(f"{self.name} makes no packages of machine code")

    def load_package(self, data: bytes, module: fx.GraphModule) -> Program:
        """The program of a package of that graph: its code is run. EngineError if it is refused."""
        raise EngineError(f"{self.name} makes no packages of machine code")


# A graph as a program: its generated code, operator by operator.


class GraphProgram:
    """The generated code of a graph, called without gradients."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(self.module(*inputs))

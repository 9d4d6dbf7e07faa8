"""A program that may fail at a call: PyTorch answers this call and all later ones.

PyTorch takes over for good only if it has answered. If it fails too, the call is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from intarsia.engines import Engine, GuardedProgram, NetworkEngine, Program
from intarsia.errors import EngineError, error_text, warn
from intarsia.runtime.ownership import Ownership, constants_of

if TYPE_CHECKING:
    from intarsia.network import Network


def has_empty(inputs: Iterable[Any]) -> bool:
    """Whether one of these tensors has no elements."""
    return any(isinstance(value, torch.Tensor) and not value.numel() for value in inputs)


ResultType = tuple[torch.dtype, torch.Size | None]  # dtype of a result, and its shape if it is fixed


class Origin:
    """The piece that a program was built from, so that it can be built again.

    `module` is the piece, and `network` is its network, converted and rewritten, for an engine that reads
    networks. Each may be a function that is called at the first access. With `only_full`, PyTorch answers
    calls with an empty tensor.
    """

    def __init__(
        self,
        engine: Engine,
        module: fx.GraphModule | Callable[[], fx.GraphModule],
        network: Network | Callable[[], Network] | None,
        only_full: bool = False,
    ) -> None:
        self.engine: Engine = engine
        self.only_full: bool = only_full
        self._module, self._network = module, network

    @cached_property
    def module(self) -> fx.GraphModule:
        return self._module if isinstance(self._module, fx.GraphModule) else self._module()

    @cached_property
    def network(self) -> Network | None:
        return self._network() if callable(self._network) else self._network


class WithFallback:
    """A piece on an engine. From the first call at which the engine fails, PyTorch runs the piece.

    PyTorch also answers calls that a guard of the program refuses, and where the origin says so, calls with
    an empty tensor. With `strict`, each of these is an error (`require_full_compilation`).
    """

    def __init__(
        self, program: Program, origin: Origin, types: Sequence[ResultType | None], *, strict: bool = False
    ) -> None:
        self.program: Program = program
        self.origin: Origin = origin
        self.otherwise: Program = InPyTorch(origin)
        if isinstance(program, GuardedProgram) and not strict:
            program.otherwise = self.otherwise
        self.engine: str = origin.engine.name
        self.failure: str | None = None  # why the engine failed
        self.types: tuple[ResultType | None, ...] = tuple(types)
        self.strict: bool = strict
        # Whether results never share memory with the inputs.
        self.fresh: bool = isinstance(origin.engine, NetworkEngine)
        self._only_full = origin.only_full

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.failure is not None or (self._only_full and not self.strict and has_empty(inputs)):
            return self.otherwise(*inputs)
        results: tuple[Any, ...] = ()
        try:
            if self._only_full and has_empty(inputs):
                raise EngineError("it takes no empty tensors")
            results = self.program(*inputs)
            reason = self._mismatch(results)
            if reason is None:
                return results
        except Exception as error:
            reason = error_text(error)
        if self.strict:
            why = "require_full_compilation=True forbids PyTorch"
            raise EngineError(f"{self.engine} failed at a call ({reason}), and {why}")
        # If PyTorch fails too, the call is the cause, and its error is raised.
        answer = self.otherwise(*inputs)
        if not all(map(_is_plain, inputs)):  # a sparse, lazily negated or fake input is no engine's failure
            warn(f"PyTorch runs this call in place of {self.engine}, which cannot read an input: {reason}")
        # Export assumes that `x[:1]` has a row, also for sizes that may be 0. Then the graph is the cause.
        elif self.failure is None and types_of(results) != types_of(answer):
            self.failure = reason
            warn(f"{self.engine} failed at a call ({reason}); PyTorch runs this segment from now on")
        return answer

    def _mismatch(self, results: Sequence[Any]) -> str | None:
        if len(results) != len(self.types):
            return f"it gives {len(results)} results where PyTorch gives {len(self.types)}"
        for number, (result, expected) in enumerate(zip(results, self.types)):  # noqa: B905
            if expected is None:
                continue
            if not isinstance(result, torch.Tensor):
                return f"result {number} is a {type(result).__name__}, not a tensor"
            dtype, shape = expected
            if result.dtype is not dtype or (shape is not None and result.shape != shape):
                size = "" if shape is None else f" {tuple(shape)}"
                return f"result {number} is {result.dtype} {tuple(result.shape)}; PyTorch makes {dtype}{size}"
        return None

    def direct(self, shapes: Sequence[tuple[int, ...]]) -> Callable[..., torch.Tensor] | None:
        """The program's own shortcut, if it has one."""
        make = getattr(self.program, "direct", None)
        return None if make is None or self._only_full else make(shapes)


class InPyTorch:
    """A piece in PyTorch, whose results have memory of their own, as an engine's do."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    @cached_property
    def _ownership(self) -> Ownership:
        module = self._origin.module
        returned: Any = module.graph.output_node().args[0]
        return Ownership(constants_of(module), [], [False] * len(returned))

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            return tuple(self._ownership.own(tuple(self._origin.module(*inputs)), inputs))


def _is_plain(value: Any) -> bool:
    """Whether a tensor's memory holds its values, so that an engine can read them there."""
    return not isinstance(value, torch.Tensor) or (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_neg() or value.is_conj())
    )


def types_of(outputs: Sequence[Any]) -> list[ResultType | None]:
    """Dtype and fixed shape of each output, from tensors or fake tensors; None for other values."""
    return [_type_of(value) if isinstance(value, torch.Tensor) else None for value in outputs]


def _type_of(value: torch.Tensor) -> ResultType:
    fixed = all(isinstance(size, int) for size in value.shape)
    return value.dtype, torch.Size(value.shape) if fixed else None

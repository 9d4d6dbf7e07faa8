"""A program that may fail at a call: PyTorch answers that call, and all later ones.

An engine that fails at a call is left for good only after PyTorch has answered: where PyTorch fails too, the
call is at fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from intarsia.engines import Engine, GuardedProgram, NetworkEngine, Program
from intarsia.errors import EngineError, error_text
from intarsia.runtime.ownership import Ownership, constants_of

if TYPE_CHECKING:
    from intarsia.network import Network


def has_empty(inputs: Iterable[Any]) -> bool:
    """Whether a tensor among these has no elements."""
    return any(isinstance(value, torch.Tensor) and not value.numel() for value in inputs)


class UnlessEmpty:
    """A program for calls whose tensors all have elements, and PyTorch for the others."""

    def __init__(self, program: Program, otherwise: Program) -> None:
        self.program: Program = program
        self.otherwise: Program = otherwise

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.otherwise(*inputs) if has_empty(inputs) else self.program(*inputs)


Made = tuple[torch.dtype, torch.Size | None]  # dtype of a result, and its shape where that is fixed


class Origin:
    """What a program was made of, so that it can be made again.

    The piece as a `module`, and what a network engine was given, converted and rewritten, as a `network`;
    each may be given as a function that makes it when it is asked for. With `only_full`, calls with an empty
    tensor are left to PyTorch.
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
    """A piece on an engine; from the first call on at which the engine fails, the same piece in PyTorch."""

    def __init__(
        self,
        program: Program,
        otherwise: Program,
        engine: str,
        makes: Sequence[Made | None],
        fresh: bool,
        origin: Origin | None = None,
        strict: bool = False,
    ) -> None:
        self.program: Program = program
        self.otherwise: Program = otherwise
        self.engine: str = engine
        self.failure: str | None = None  # what went wrong, once it has
        self.makes: tuple[Made | None, ...] = tuple(makes)
        self.origin = origin
        self.strict = strict  # whether PyTorch may not answer: everything was to be compiled
        self.fresh = fresh  # whether results never lie in what the program was given

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.failure is not None:
            return self.otherwise(*inputs)
        results: tuple[Any, ...] = ()
        try:
            results = self.program(*inputs)
            reason = self._unlike(results)
            if reason is None:
                return results
        except Exception as error:
            reason = error_text(error)
        if self.strict:
            why = "require_full_compilation=True forbids PyTorch"
            raise EngineError(f"{self.engine} failed at a call ({reason}), and {why}")
        # If PyTorch fails too, the call is the cause, and its error is raised.
        answer = self.otherwise(*inputs)
        # Export takes `x[:1]` to have a row, also of sizes that may be 0: then the graph is at fault.
        if self.failure is None and makes_of(results) != makes_of(answer):
            self.failure = reason
            warnings.warn(
                f"{self.engine} failed at a call ({reason}); PyTorch runs this segment from now on",
                stacklevel=2,
            )
        return answer

    def _unlike(self, results: Sequence[Any]) -> str | None:
        if len(results) != len(self.makes):
            return f"it gives {len(results)} results where PyTorch gives {len(self.makes)}"
        for number, (result, expected) in enumerate(zip(results, self.makes)):  # noqa: B905
            if expected is None:
                continue
            if not isinstance(result, torch.Tensor):
                return f"result {number} is a {type(result).__name__}, not a tensor"
            dtype, shape = expected
            if result.dtype is not dtype or (shape is not None and result.shape != shape):
                wanted = "" if shape is None else f" {tuple(shape)}"
                return (
                    f"result {number} is {result.dtype} {tuple(result.shape)}; PyTorch makes {dtype}{wanted}"
                )
        return None

    def direct(self, shapes: Sequence[tuple[int, ...]]) -> Callable[..., torch.Tensor] | None:
        """The program's own short way, where it has one."""
        make = getattr(self.program, "direct", None)
        return None if make is None else make(shapes)


def with_fallback(
    program: Program, origin: Origin, makes: Sequence[Made | None], *, strict: bool = False
) -> WithFallback:
    """A program that PyTorch answers for where it may not, will not or cannot; never if it is `strict`."""
    in_pytorch = InPyTorch(origin)
    if isinstance(program, GuardedProgram) and not strict:
        program.otherwise = in_pytorch
    if origin.only_full:
        program = UnlessEmpty(program, _refuse_empty if strict else in_pytorch)
    fresh = isinstance(origin.engine, NetworkEngine)
    return WithFallback(program, in_pytorch, origin.engine.name, makes, fresh, origin, strict)


def _refuse_empty(*_: Any) -> tuple[Any, ...]:
    raise EngineError("it takes no empty tensors")  # where PyTorch may not answer


class InPyTorch:
    """A piece in PyTorch in place of an engine: results lie in memory of their own, as an engine's do."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    @cached_property
    def _ownership(self) -> Ownership:
        module = self._origin.module
        returned: Any = next(iter(reversed(module.graph.nodes))).args[0]
        return Ownership(constants_of(module), [], [False] * len(returned))

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            return tuple(self._ownership.own(tuple(self._origin.module(*inputs)), inputs))


def makes_of(outputs: Sequence[Any]) -> list[Made | None]:
    """Dtype and fixed shape of each output, from the graph's fake values; None for what is not a tensor."""
    return [_made(value) if isinstance(value, torch.Tensor) else None for value in outputs]


def _made(value: torch.Tensor) -> Made:
    fixed = all(isinstance(size, int) for size in value.shape)
    return value.dtype, torch.Size(value.shape) if fixed else None

"""A program that may fail at a call: PyTorch answers that call, and all later ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intarsia.engines import Engine, GuardedProgram, NetworkEngine, Program
from intarsia.network import Network
from intarsia.runtime.empty import UnlessEmpty
from intarsia.runtime.ownership import Ownership, constants_of

Made = tuple[torch.dtype, torch.Size | None]  # dtype of a result, and its shape where that is fixed


@dataclass(frozen=True, eq=False)
class Origin:
    """What a program was made of, so that it can be made again."""

    engine: Engine
    module: fx.GraphModule  # the piece
    network: Network | None  # what a network engine was given: converted and rewritten
    only_full: bool = False  # whether calls with an empty tensor are left to PyTorch


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
    ) -> None:
        self.program, self.otherwise, self.engine = program, otherwise, engine
        self.failure: str | None = None  # what went wrong, once it has
        self.makes = tuple(makes)
        self.origin = origin
        self.fresh = fresh  # whether results never lie in what the program was given

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.failure is not None:
            return self.otherwise(*inputs)
        try:
            made = self.program(*inputs)
            reason = self._unlike(made)
            if reason is None:
                return made
        except Exception as error:
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        answer = self.otherwise(
            *inputs
        )  # where PyTorch fails too, the call is at fault, and its error is told
        if self.failure is None:
            self.failure = reason
            warnings.warn(
                f"{self.engine} failed at a call ({reason}); PyTorch runs this segment from now on",
                stacklevel=2,
            )
        return answer

    def _unlike(self, made: Sequence[Any]) -> str | None:
        if len(made) != len(self.makes):
            return f"it gives {len(made)} results where PyTorch gives {len(self.makes)}"
        for number, (result, expected) in enumerate(zip(made, self.makes)):  # noqa: B905
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


def with_fallback(program: Program, origin: Origin, makes: Sequence[Made | None]) -> WithFallback:
    """A program that PyTorch answers for where it may not, will not or cannot."""
    in_pytorch = run_in_pytorch(origin.module)
    if isinstance(program, GuardedProgram):
        program.otherwise = in_pytorch
    if origin.only_full:
        program = UnlessEmpty(program, in_pytorch)
    fresh = isinstance(origin.engine, NetworkEngine)
    return WithFallback(program, in_pytorch, origin.engine.name, makes, fresh, origin)


def run_in_pytorch(module: fx.GraphModule) -> Program:
    """A piece in PyTorch in place of an engine: results lie in memory of their own, as an engine's do."""
    returned: Any = next(iter(reversed(module.graph.nodes))).args[0]
    ownership = Ownership(constants_of(module), [], [False] * len(returned))

    def program(*inputs: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            return tuple(ownership.own(tuple(module(*inputs)), inputs))

    return program


def makes_of(outputs: Sequence[Any]) -> list[Made | None]:
    """Dtype and fixed shape of each output, out of the graph's (fake) values; None for what is no tensor."""
    return [_made(value) if isinstance(value, torch.Tensor) else None for value in outputs]


def _made(value: torch.Tensor) -> Made:
    fixed = all(isinstance(size, int) for size in value.shape)
    return value.dtype, torch.Size(value.shape) if fixed else None

"""A program that may fail at a call: PyTorch answers that call, and all later ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from intarsia.engines import Program

Made = tuple[torch.dtype, torch.Size | None]  # dtype of a result, and its shape where that is fixed


class WithFallback:
    """A piece on an engine; from the first call on at which the engine fails, the same piece in PyTorch."""

    def __init__(
        self, program: Program, otherwise: Program, engine: str, makes: Sequence[Made | None], fresh: bool
    ) -> None:
        self.program, self.otherwise, self.engine = program, otherwise, engine
        self.failure: str | None = None  # what went wrong, once it has
        self._makes = tuple(makes)
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
        if len(made) != len(self._makes):
            return f"it gives {len(made)} results where PyTorch gives {len(self._makes)}"
        for number, (result, expected) in enumerate(zip(made, self._makes)):  # noqa: B905
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


def makes_of(outputs: Sequence[Any]) -> list[Made | None]:
    """Dtype and fixed shape of each output, out of the graph's (fake) values; None for what is no tensor."""
    return [_made(value) if isinstance(value, torch.Tensor) else None for value in outputs]


def _made(value: torch.Tensor) -> Made:
    fixed = all(isinstance(size, int) for size in value.shape)
    return value.dtype, torch.Size(value.shape) if fixed else None

"""The way from a model to its compiled forward: encoder, prompts and tokens, each with options of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from intarsia.engines import short_engines
from intarsia.errors import InputError
from intarsia.generation.anatomy import Anatomy
from intarsia.generation.check import LEAST, Checked, checked, worst
from intarsia.generation.encoder import EncoderForward
from intarsia.generation.forward import GeneratingForward, Programs
from intarsia.generation.programs import (
    compiled_continuation,
    compiled_encoder,
    compiled_prompts,
    compiled_token,
)
from intarsia.options import CompileOptions
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled

Program = Compiled | PartlyCompiled


@dataclass(frozen=True)
class Making:
    """What is compiled, for which calls; `examples` are prompts to be tried on."""

    model: nn.Module
    anatomy: Anatomy
    rows: tuple[int, ...]
    max_length: int
    padding: bool | None
    examples: Sequence[torch.Tensor]
    continued: bool = False

    def __post_init__(self) -> None:
        if self.continued and self.anatomy.source is not None:
            raise InputError(
                f"continued=True is for decoders, and {type(self.model).__name__} has an encoder"
            )
        for one in self.examples:
            if self.anatomy.source is not None:
                raise InputError(
                    f"examples are prompts of decoders, and {type(self.model).__name__} has an encoder"
                )
            if not isinstance(one, torch.Tensor) or one.ndim != 2 or one.dtype != torch.long:
                is_tensor = isinstance(one, torch.Tensor)
                given = f"{one.dtype} {tuple(one.shape)}" if is_tensor else repr(one)
                raise InputError(
                    f"an example is {given}; it must be token ids, rows by tokens, of torch.long"
                )
            if one.shape[0] not in self.rows or not LEAST <= one.shape[1] <= self.max_length:
                rows = " or ".join(map(str, self.rows))
                raise InputError(
                    f"an example is {tuple(one.shape)}; it must have {rows} rows and {LEAST} to"
                    f" {self.max_length} tokens"
                )

    def encoder(self, options: CompileOptions) -> EncoderForward | None:
        return compiled_encoder(self.model, self.anatomy, self.rows, self.padding, options)

    def prompts(self, options: CompileOptions) -> dict[int, tuple[Program | None, Program | None]]:
        return {
            n: compiled_prompts(
                self.model, self.anatomy, n, self.max_length, self.padding, self._of(n), options
            )
            for n in self.rows
        }

    def tokens(self, options: CompileOptions) -> dict[int, Program]:
        return {
            n: compiled_token(self.model, self.anatomy, n, self.max_length, self._of(n), options)
            for n in self.rows
        }

    def continuations(self, options: CompileOptions) -> dict[int, Program]:
        return {
            n: compiled_continuation(self.model, self.anatomy, n, self.max_length, self._of(n), options)
            for n in self.rows
            if self.continued
        }

    def forward(
        self,
        encoder: EncoderForward | None,
        prompts: Mapping[int, tuple[Program | None, Program | None]],
        tokens: Mapping[int, Program],
        continuations: Mapping[int, Program],
    ) -> GeneratingForward:
        programs = {n: Programs(*prompts[n], tokens[n], continuations.get(n)) for n in self.rows}
        return GeneratingForward(self.model, self.anatomy, programs, self.max_length, encoder)

    def check(self, forward: GeneratingForward, tolerance: float | None) -> Checked:
        """The worst of all numbers of rows."""
        return worst(checked(forward, n, tolerance, self._of(n)) for n in self.rows)

    def _of(self, rows: int) -> list[torch.Tensor]:
        return [one.to(self.anatomy.device) for one in self.examples if one.shape[0] == rows]


def exact(options: CompileOptions) -> CompileOptions:
    """The options without those that allow shorter arithmetic."""
    return options.changed(tolerance=None, precision=None)


def is_short(program: Program | None) -> bool:
    """Whether any of it runs in shorter arithmetic than the model's own."""
    return program is not None and any(name in short_engines() for name in program.plan.engines)


def why_exact(token: Program, tolerance: float) -> str:
    """Why the program of a token is not in shorter arithmetic, as the search for it has told."""
    findings = getattr(token.plan, "findings", None)
    told = [*([] if findings is None else findings.left_out), *token.notes]
    reasons = [reason for reason in told if reason.startswith(tuple(short_engines()))]
    if not reasons:
        return f"tokens are exact: within tolerance={tolerance:g} nothing shorter was measured to be faster"
    return f"tokens are exact: nothing shorter is faster within tolerance={tolerance:g}: {'; '.join(reasons)}"

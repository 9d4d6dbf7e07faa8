"""`compile_generation`: compiled programs in place of a model's forward.

Encoder, prompts and tokens are compiled with separate options. If shorter arithmetic makes the error of all
together too large, some of them are compiled exactly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from intarsia.engines import short_engines
from intarsia.engines.building import sharing_weights
from intarsia.errors import InputError
from intarsia.generation.anatomy import anatomy_of
from intarsia.generation.check import LEAST, Checked, checked, worst
from intarsia.generation.forward import GeneratingForward, Programs
from intarsia.generation.loop import place
from intarsia.generation.programs import GenerationJob
from intarsia.options import CompileOptions
from intarsia.runtime.forwards import CompiledModel, PlacedForward
from intarsia.runtime.weights import release_memory

T = TypeVar("T")


@dataclass(eq=False)
class Generation:
    """A model whose `generate` runs compiled programs; `restore()`, or the end of a `with` block, undoes it.

    `model` is your model with another `forward`. Its `generate(...)` is unchanged. `error` is the largest
    error of the logits in the comparison after the compile, as a share of the largest logit.
    """

    model: nn.Module
    forward: GeneratingForward
    error: float = 0.0
    tolerance: float | None = None
    notes: tuple[str, ...] = ()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`."""
        return self.model.generate(*args, **kwargs)  # type: ignore[operator]

    def enable(self, on: bool = True) -> None:
        """Use the compiled programs, or with `on=False` the model's own forward."""
        self.forward.enable(on)

    def restore(self) -> None:
        """Restore the model's own forward and release the compiled programs."""
        self.forward.take_out()
        self.forward.by_rows, self.forward.encoder, self.forward.programs = {}, None, []

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def __str__(self) -> str:
        forward = self.forward
        lines = [f"{forward.path} generates compiled, up to {forward.max_length} tokens"]
        named: list[tuple[str, CompiledModel | None]] = []
        masked = "padded prompt"
        if forward.encoder is not None:
            named = [("encoder", forward.encoder.plain), ("encoder, padded", forward.encoder.masked)]
            masked = "prompt"
        for rows, programs in forward.by_rows.items():
            named += [
                (f"batch {rows}, prompt", programs.prompt),
                (f"batch {rows}, {masked}", programs.masked_prompt),
                (f"batch {rows}, token", programs.token),
                (f"batch {rows}, tokens after a cache", programs.continued),
            ]
        lines += [f"  {name}: on {', '.join(it.plan.engines)}" for name, it in named if it is not None]
        if self.tolerance is not None:
            error = f"error of logits {self.error:.2g} of the largest; tolerance={self.tolerance:g}"
            lines.append(
                f"  {error}; measured on the prompts of the compile; the error of other prompts may be larger"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def compile_generation(
    model: nn.Module,
    *,
    max_length: int,
    batch: int | Sequence[int] = 1,
    padding: bool | None = None,
    max_source: int | None = None,
    continued: bool = False,
    examples: Sequence[torch.Tensor] = (),
    **options: Any,
) -> Generation:
    """Make `model.generate(...)` use compiled programs. Transformers still does sampling, beams and
    streaming.

    A decoder gets one program for prompts of 2 to `max_length` tokens, and one for single tokens. An encoder
    gets a program, too. Calls without a compiled program use the model's own forward on the same cache, with
    a warning. Examples are more tokens, another number of rows, attentions in the output, or changed weights.

    Args:
        model: a decoder of transformers, or an encoder with a decoder, in evaluation.
        max_length: tokens of prompt and answer together.
        batch: rows of a call (sequences times beams), or several such numbers.
        padding: whether prompts may be padded. By default, if there is more than one row.
        max_source: the largest number of tokens that an encoder reads. By default, its own length or
            `max_length`.
        continued: compile a third program, for several tokens after those in a cache. A second turn of a
            conversation, assisted decoding and prompt lookup use it. It takes as long to compile as the
            program for prompts.
        examples: prompts of a decoder that are compared in addition to random ones if you give a tolerance.
        options: those of `intarsia.compile`. With `tolerance=0.05`, weights may have 8 or 4 bits if that is
            faster and logits, keys and values stay within this share of their largest value. `error` of the
            result is the largest error of the logits.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with compile_generation(model, max_length=8, engines="pytorch"):
    ...     model.generate(torch.tensor([[1, 5]]), max_new_tokens=3, min_new_tokens=3).shape
    torch.Size([1, 5])
    """
    compile_options = CompileOptions.checked(options, "compile_generation", preset=["fallback", "examples"])
    rows = (batch,) if isinstance(batch, int) or not isinstance(batch, Sequence) else tuple(batch)
    if not rows or any(not _is_count(n, 1) for n in rows):
        raise InputError(f"batch is {batch!r}; it must be a number of rows, or several")
    if not _is_count(max_length, LEAST):
        raise InputError(f"max_length is {max_length!r}; it must be {LEAST} or more")
    if max_source is not None and not _is_count(max_source, 1):
        raise InputError(f"max_source is {max_source!r}; it must be 1 or more")
    if padding not in (None, True, False):
        raise InputError(f"padding is {padding!r}; it must be True, False or None")
    if isinstance(examples, torch.Tensor) or not isinstance(examples, Sequence):
        raise InputError(f"examples are {examples!r}; they must be a list of prompts")
    with _disabled_programs(model), sharing_weights() as shared:
        anatomy = anatomy_of(model, max_length, max_source)
        job = GenerationJob(model, anatomy, rows, max_length, padding, tuple(examples), continued)
        generation = _compiled(job, compile_options)
    generation.notes = (*shared.notes, *generation.notes)
    release_memory(model)  # its own forward was compared with the programs, and has read all weights
    if not generation.forward.enabled:
        warnings.warn(generation.notes[-1], stacklevel=2)
    place(generation.forward)
    return generation


@contextmanager
def _disabled_programs(model: nn.Module) -> Iterator[None]:
    """Disable programs that are in the model already: answers are compared with the model's own."""
    placed = vars(model).get("forward") if isinstance(model, nn.Module) else None
    if not isinstance(placed, PlacedForward) or not placed.enabled:
        yield
        return
    placed.enable(False)
    try:
        yield
    finally:
        placed.enable()


def _compiled(job: GenerationJob, options: CompileOptions) -> Generation:
    """The programs, in arithmetic as short as `options` and the comparison of all together allow."""
    encoder, tolerance, notes = job.encoder(options), options.accuracy.tolerance, list[str]()
    prompts, tokens = _for_rows(job, job.prompts, options), _for_rows(job, job.token, options)
    continuations = _for_rows(job, job.continuation, options)

    def whole() -> tuple[GeneratingForward, Checked]:
        """The forward with the present programs, compared with the model's own."""
        programs = {n: Programs(*prompts[n], tokens[n], continuations[n]) for n in job.rows}
        forward = GeneratingForward(job.model, job.anatomy, programs, job.max_length, encoder)
        return forward, worst(checked(forward, n, tolerance, job.examples_of(n)) for n in job.rows)

    forward, result = whole()
    # Errors of keys and values add up in the cache, so programs that are accurate alone may not be together.
    read_first = [one for pair in prompts.values() for one in pair]
    read_first += [] if encoder is None else [encoder.plain, encoder.masked]
    read_first += continuations.values()
    if result.fault is not None and any(map(is_short, read_first)):
        notes.append(f"prompts are exact: in shorter arithmetic, the compiled model {result.fault}")
        encoder, prompts = job.encoder(exact(options)), _for_rows(job, job.prompts, exact(options))
        continuations = _for_rows(job, job.continuation, exact(options))
        forward, result = whole()
    if result.fault is not None and any(map(is_short, tokens.values())):
        notes.append(f"tokens are exact: in shorter arithmetic, the compiled model {result.fault}")
        tokens = _for_rows(job, job.token, exact(options))
        forward, result = whole()
    elif tolerance is not None and not any(map(is_short, tokens.values())):
        notes.append(why_exact(tokens[job.rows[0]], tolerance))
    forward.tolerance = tolerance
    generation = Generation(job.model, forward, result.error, tolerance, tuple(notes))
    if result.fault is not None:
        generation.enable(False)
        generation.notes += (f"the model runs as it is, in PyTorch: the compiled model {result.fault}",)
    return generation


def _for_rows(
    job: GenerationJob, compiled: Callable[[int, CompileOptions], T], options: CompileOptions
) -> dict[int, T]:
    return {rows: compiled(rows, options) for rows in job.rows}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def exact(options: CompileOptions) -> CompileOptions:
    """The options without shorter arithmetic."""
    return options.changed(tolerance=None, precision=None)


def is_short(program: CompiledModel | None) -> bool:
    """Whether any segment of a program runs in shorter arithmetic than the model's."""
    return program is not None and any(name in short_engines() for name in program.plan.engines)


def why_exact(token: CompiledModel, tolerance: float) -> str:
    """Why the program for a token is exact, by the notes of its search."""
    findings = getattr(token.plan, "findings", None)
    notes = [*([] if findings is None else findings.left_out), *token.notes]
    reasons = [reason for reason in notes if reason.startswith(tuple(short_engines()))]
    if not reasons:
        return f"tokens are exact: within tolerance={tolerance:g} nothing shorter was measured to be faster"
    return f"tokens are exact: nothing shorter is faster within tolerance={tolerance:g}: {'; '.join(reasons)}"

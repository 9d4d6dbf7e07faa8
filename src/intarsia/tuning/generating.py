"""A model of transformers that was seen to generate, compiled as one that does: prompts, tokens, a cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intarsia.errors import IntarsiaError
from intarsia.options import CompileOptions
from intarsia.timing import PAUSE_S, race
from intarsia.tuning.recorded import Recorded

if TYPE_CHECKING:
    from intarsia.generation import Generation
    from intarsia.generation.forward import GeneratingForward

_TOKENS = 8  # that are timed after a prompt


def generates(module: nn.Module, calls: Recorded) -> bool:
    """Whether the module is a decoder of transformers, and was given prompts and a cache to fill."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and module.can_generate() and bool(_prompts(calls))


def generating_forward(
    path: str, module: nn.Module, calls: Recorded, options: CompileOptions, *, only_if_faster: bool
) -> GeneratingForward | str:
    """A `forward` for the model, for the rows seen and up to twice the tokens; or why it stays as it is."""
    from intarsia.generation import compile_generation
    from intarsia.generation.check import LEAST

    prompts = _prompts(calls)
    given = {name: v for name, v in options.keywords().items() if name not in ("examples", "fallback")}
    most = getattr(module.config, "max_position_embeddings", None) or 2 * calls.tokens
    try:
        made = compile_generation(
            module,
            max_length=max(LEAST, calls.tokens, min(2 * calls.tokens, most)),
            batch=sorted({ids.shape[0] for ids in prompts}),
            padding=True if any(_is_padded(call.kwargs) for call in calls) else None,
            examples=[ids for ids in prompts if ids.shape[1] >= LEAST][:2],
            **given,
        )
    except IntarsiaError as error:
        return str(error).splitlines()[0]
    reason = None if made.forward.enabled else made.notes[-1]
    if reason is None and only_if_faster:
        reason = _slower(made, prompts[0])
    if reason is not None:
        made.restore()
        return reason
    made.forward.path = path
    return made.forward


def _prompts(calls: Recorded) -> list[torch.Tensor]:
    """The token ids of calls that fill a cache with several tokens, the longest first."""
    found = [
        ids
        for kind in calls.kinds
        for call in kind.calls
        if isinstance(ids := call.kwargs.get("input_ids"), torch.Tensor)
        and call.kwargs.get("past_key_values") is not None
    ]
    return sorted((ids for ids in found if ids.shape[1] > 1), key=lambda ids: -ids.shape[1])


def _is_padded(kwargs: Mapping[str, Any]) -> bool:
    mask = kwargs.get("attention_mask")
    return isinstance(mask, torch.Tensor) and not bool(mask.all())


def _slower(generation: Generation, prompt: torch.Tensor) -> str | None:
    """That generating by programs is not faster, in a clause."""

    def timed(on: bool) -> Any:
        def run() -> Any:
            generation.enable(on)
            count = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS}
            return generation.generate(prompt, **count, do_sample=False)

        return run

    times = race(
        {"own": timed(False), "compiled": timed(True)}, rounds=5, warmup=1, budget_s=5, pause_s=PAUSE_S
    )
    generation.enable()
    own, ours = times["own"].median * 1e3, times["compiled"].median * 1e3
    if ours < own:
        return None
    return f"{_TOKENS} tokens take {ours:.3g} ms compiled, and {own:.3g} ms as it is"

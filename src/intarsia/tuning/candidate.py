"""A module compiled for its recorded calls, or for generation, compared on them and timed; or why not."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.build.judge import Call, Example, Judge, judged_example, whole_fault
from intarsia.capture.example import device_kind
from intarsia.compiler.entry import compile_whole
from intarsia.engines import Engine, resolve_engines
from intarsia.errors import InputError, IntarsiaError, InternalError, first_line
from intarsia.graph.segment import PYTORCH
from intarsia.lower.lowered import example_inputs
from intarsia.options import CompileOptions
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.forwards import PlacedForward
from intarsia.timing import PAUSE_S, race
from intarsia.tuning.recorded import PLAIN, CallsOfKind, Recorded, RecordedCall

if TYPE_CHECKING:
    from intarsia.generation import Generation
    from intarsia.generation.forward import GeneratingForward


_MOST_KINDS = 4  # of calls, since each kind costs a compile
_TOKENS = 8  # that are timed after a prompt
_LEAST_SHARE = 0.1  # of the module's time that a kind of call must take to be compiled


def compiled_for(
    path: str, module: nn.Module, calls: Recorded, options: CompileOptions, *, only_if_faster: bool
) -> PlacedForward | str:
    """A `forward` for the module, or a clause that says why it has none."""
    reason = _unsuitable(module, calls)
    if reason is not None:
        return reason
    if generates(module, calls):
        return generating_forward(path, module, calls, options, only_if_faster=only_if_faster)
    reason = _unsupported_arguments(calls)
    if reason is not None:
        return reason
    programs: list[Compiled] = []
    examples: list[Call] = []
    reasons: list[str] = []
    for kind in calls.kinds[:_MOST_KINDS]:
        if kind.seconds < _LEAST_SHARE * calls.seconds:
            continue
        outcome = _program(module, kind, options, only_if_faster)
        if isinstance(outcome, str):
            reasons.append(outcome)
        else:
            programs.append(outcome)
            examples.append((kind.example.args, kind.example.kwargs))
    return PlacedForward(path, module, programs, examples) if programs else reasons[0]


def _unsuitable(module: nn.Module, calls: Recorded) -> str | None:
    """Why a module in its present state is not compiled; None if it can be."""
    if not calls.total:
        return "it was not called"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript's"
    if any(part.training for part in module.modules()):
        return "it is in training mode"
    if any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers())):
        return "its weights were made in inference mode, where torch does not count changes"
    if "forward" in module.__dict__:
        return "its forward was replaced by other code"
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return "it has hooks"
    if any(kind.autocast for kind in calls.kinds):
        return "it is called under autocast"
    return None


def _unsupported_arguments(calls: Recorded) -> str | None:
    """Why a program cannot take the arguments of the calls; None if it can."""
    if any(kind.fills for kind in calls.kinds):
        return "it changes a list or dictionary of its arguments"
    leaves = pytree.tree_leaves([(call.args, call.kwargs) for call in calls])
    strange = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))), None)
    return None if strange is None else f"its arguments contain a {type(strange).__name__}"


def _program(
    module: nn.Module, kind: CallsOfKind, options: CompileOptions, only_if_faster: bool
) -> Compiled | str:
    example, reason = kind.example, ""
    for shapes in dict.fromkeys((kind.dynamic_shapes is not None, False)):
        try:
            with torch.inference_mode(False), torch.no_grad():
                compiled = compile_whole(
                    options,
                    module,
                    example.args,
                    example.kwargs,
                    dynamic_shapes=kind.dynamic_shapes if shapes else None,
                )
        except IntarsiaError as error:
            reason = first_line(error)
            if isinstance(error, InternalError):
                warnings.warn(f"{type(module).__name__} runs as it is, in PyTorch: {reason}", stacklevel=2)
            continue
        device = device_kind(module, example.args, example.kwargs)
        engines, _ = resolve_engines(options.engines, device)
        reason = _fault(module, compiled, kind, engines, only_if_faster) or ""
        if not reason:
            return compiled
    return reason


def _fault(
    module: nn.Module, compiled: Compiled, kind: CallsOfKind, engines: Sequence[Engine], only_if_faster: bool
) -> str | None:
    """Why the program must not, or need not, replace the module's forward."""
    if set(compiled.plan.engines) <= {PYTORCH}:
        return "all of it would run in PyTorch"
    changed = next((note for note in compiled.notes if note.startswith("frozen by capture")), None)
    if changed is not None:
        return changed
    judge, coarsest = Judge(module), max(engine.coarsest for engine in engines)
    for recorded in kind.calls:
        call = (recorded.args, recorded.kwargs)
        try:
            judge.answer(call, compiled)
        except InputError:
            continue  # the module's own forward answers such calls
        lowered = compiled.lowered
        example = judged_example(judge, lowered, Example(call, example_inputs(lowered, *call)))
        wrong = whole_fault(judge, lowered, compiled, [example], coarsest)
        if wrong is not None:
            return f"compiled, it {wrong}"
    return _slower(module, compiled, kind.example) if only_if_faster else None


def _slower(module: nn.Module, compiled: Compiled, call: RecordedCall) -> str | None:
    """A clause if the program is not faster; None if it is."""
    with torch.no_grad():
        return _not_faster(
            lambda: module(*call.args, **call.kwargs),
            lambda: compiled(*call.args, **call.kwargs),
            "compiled, it takes",
            rounds=15,
            budget_s=3,
        )


def _not_faster(own: Callable[[], Any], compiled: Callable[[], Any], takes: str, **limits: Any) -> str | None:
    """A clause with both times if the compiled call is not faster; None if it is."""
    times = race({"own": own, "compiled": compiled}, pause_s=PAUSE_S, **limits)
    before, after = times["own"].median * 1e3, times["compiled"].median * 1e3
    return None if after < before else f"{takes} {after:.3g} ms; as it is, {before:.3g} ms"


def generates(module: nn.Module, calls: Recorded) -> bool:
    """Whether the module is a decoder of transformers that was called with prompts and a cache."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and module.can_generate() and bool(_prompts(calls))


def generating_forward(
    path: str, module: nn.Module, calls: Recorded, options: CompileOptions, *, only_if_faster: bool
) -> GeneratingForward | str:
    """A `forward` for generation, for the recorded rows and up to twice the tokens; or why there is none."""
    from intarsia.generation import compile_generation
    from intarsia.generation.check import LEAST

    prompts = _prompts(calls)
    keywords = {name: v for name, v in options.keywords().items() if name not in ("examples", "fallback")}
    most = getattr(module.config, "max_position_embeddings", None) or 2 * calls.tokens
    try:
        generation = compile_generation(
            module,
            max_length=max(LEAST, calls.tokens, min(2 * calls.tokens, most)),
            batch=sorted({ids.shape[0] for ids in prompts}),
            padding=True if any(_is_padded(call.kwargs) for call in calls) else None,
            examples=[ids for ids in prompts if ids.shape[1] >= LEAST][:2],
            **keywords,
        )
    except IntarsiaError as error:
        return first_line(error)
    reason = None if generation.forward.enabled else generation.notes[-1]
    if reason is None and only_if_faster:
        reason = _slower_generation(generation, prompts[0])
    if reason is not None:
        generation.restore()
        return reason
    generation.forward.path = path
    return generation.forward


def _prompts(calls: Recorded) -> list[torch.Tensor]:
    """The token ids of calls that put several tokens into a cache, the longest first."""
    prompts = [
        ids
        for kind in calls.kinds
        for call in kind.calls
        if isinstance(ids := call.kwargs.get("input_ids"), torch.Tensor)
        and call.kwargs.get("past_key_values") is not None
    ]
    return sorted((ids for ids in prompts if ids.shape[1] > 1), key=lambda ids: -ids.shape[1])


def _is_padded(kwargs: Mapping[str, Any]) -> bool:
    mask = kwargs.get("attention_mask")
    return isinstance(mask, torch.Tensor) and not bool(mask.all())


def _slower_generation(generation: Generation, prompt: torch.Tensor) -> str | None:
    """A clause if generating with programs is not faster; None if it is."""

    def timed(on: bool) -> Any:
        def run() -> Any:
            generation.enable(on)
            count = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS}
            return generation.generate(prompt, **count, do_sample=False)

        return run

    takes = f"compiled, {_TOKENS} tokens take"
    reason = _not_faster(timed(False), timed(True), takes, rounds=5, warmup=1, budget_s=5)
    generation.enable()
    return reason

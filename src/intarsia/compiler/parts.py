"""Compiling the submodules of a model that cannot be captured as a whole, largest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call as Call
from intarsia.capture.example import bound_arguments, copied_call, is_transformed
from intarsia.capture.protect import kept_random_state, shared_copy, undisturbed
from intarsia.capture.run_effects import attributes_of, changing_modules
from intarsia.capture.watch import Ended, watch_calls
from intarsia.compare import disagreement
from intarsia.errors import CaptureError, IntarsiaError, PartitionError, first_line
from intarsia.partition.names import (
    DispatchedOps,
    check_engine_names,
    check_op_names,
    module_test,
    unknown_module,
)
from intarsia.partition.options import ModuleName, PartitionOptions
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.forwards import PartlyCompiled, assembled

P = TypeVar("P")
# Compiles or explains the submodule at a path for a call with dynamic shapes; the result has a `plan`.
PartFunction = Callable[[str, nn.Module, Call, Any], P]
CompileOne = PartFunction[Compiled]
MOST_TRIES = 48  # submodules that are tried, since each costs an export
_MOST_CALLS = 4  # calls recorded of one submodule


def compile_parts(
    model: nn.Module, call: Call, reason: str, compile_one: CompileOne | None, notes: Sequence[str]
) -> PartlyCompiled:
    """The model with the submodules compiled that can be, compared with the model as a whole.

    `compile_one(path, module, call, dynamic_shapes)` compiles a submodule for its recorded call. If it is
    None, nothing is compiled. The model itself is not changed.
    """
    notes = [*notes, f"the model is not captured as a whole: {reason}"]
    if compile_one is None or isinstance(model, torch.jit.ScriptModule):
        notes = [*notes, "the whole model runs as it is, in PyTorch"]
        return PartlyCompiled(shared_copy(model), {}, notes, reason, model)
    recording = _record(model, call)
    parts, failures = _each_part(model, recording, compile_one)
    notes += [f"{path} runs as it is: {why}" for path, why in failures.items()]
    partly = assembled(model, parts, notes, reason)
    fault = _fault(partly, call, recording.answer) if parts else None
    if fault is None:
        return partly
    # One part may cause the difference: keep the parts that agree when they are compiled alone.
    alone = {
        p: c
        for p, c in parts.items()
        if _fault(assembled(model, {p: c}, (), reason), call, recording.answer) is None
    }
    notes += [
        f"{path} runs as it is: the compiled model answers differently: {fault}"
        for path in {*parts} - {*alone}
    ]
    partly = assembled(model, alone, notes, reason)
    fault = _fault(partly, call, recording.answer) if alone else None
    if fault is None:
        return partly
    return assembled(
        model, {}, [*notes, f"the whole model runs as it is: compiled in parts, it {fault}"], reason
    )


@dataclasses.dataclass
class _Recording:
    """One run of a model: its answer, the calls of its submodules, and which of them cannot be parts."""

    answer: list[torch.Tensor]
    calls: dict[str, list[Call]]
    changing: set[str]  # submodules whose Python attributes the run changes
    filling: set[str]  # submodules that change a list, dictionary or cache among their arguments
    transformed: set[str]  # submodules that a transform of torch.func runs


def _record(model: nn.Module, call: Call) -> _Recording:
    """Run the model on a copy of the call, and record the calls of its submodules.

    `tuning.recorded` uses the same hooks over several runs of a program, to count and time calls. Here the
    first calls become examples.
    """
    calls: dict[str, list[Call]] = {}
    filling: set[str] = set()
    transformed: set[str] = set()

    def begin(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Ended], None]:
        recorded = calls.setdefault(path, [])
        if is_transformed((args, kwargs)):
            transformed.add(path)
        elif len(recorded) < _MOST_CALLS:
            recorded.append(copied_call((args, kwargs)))
        return lambda ended: filling.update([path] if ended.fills else [])

    handles = [
        handle
        for path, module in model.named_modules()
        if path and not isinstance(module, torch.jit.ScriptModule)
        for handle in watch_calls(module, partial(begin, path))
    ]
    copy = shared_copy(model)  # it has the hooks, and the run changes its attributes, not the model's
    before = attributes_of(copy)
    args, kwargs = copied_call(call)
    try:
        with undisturbed(copy), kept_random_state():
            answer = _snapshot(copy(*args, **kwargs))
            changing = changing_modules(before, attributes_of(copy))
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} fails on the example itself: {type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return _Recording(answer, calls, changing, filling, transformed)


def explain_parts(
    model: nn.Module, call: Call, explain_one: PartFunction[P]
) -> tuple[dict[str, P], dict[str, str]]:
    """What `explain_one` says of each submodule that `compile` compiles, and why others are not compiled."""
    return _each_part(model, _record(model, call), explain_one)


def _each_part(
    model: nn.Module, recording: _Recording, function: PartFunction[P]
) -> tuple[dict[str, P], dict[str, str]]:
    """The result of `function` for each part by path, and why other submodules failed; parts do not nest."""
    modules = dict(model.named_modules())
    order = sorted(recording.calls, key=lambda path: -_elements(modules[path]))
    parts: dict[str, P] = {}
    failures: dict[str, str] = {}
    covered: list[str] = []
    tries = 0
    for path in order:
        module = modules[path]
        if any(path.startswith(f"{outer}.") for outer in covered) or not _elements(module):
            continue
        why = _not_a_part(path, module, recording)
        if why is None and tries >= MOST_TRIES:
            why = f"{MOST_TRIES} larger modules were tried already"
        if why is None:
            tries += 1
            outcome = _for_calls(path, module, recording.calls[path], function)
            if not isinstance(outcome, str):
                covered.append(path)
                if set(outcome.plan.engines) - {"pytorch"}:  # type: ignore[attr-defined]
                    parts[path] = outcome
                    continue
                outcome = "no engine takes any of it"
            why = outcome
        failures[path] = why
    # If a module fails because of its parts, their reasons are enough.
    return parts, {p: w for p, w in failures.items() if not any(part.startswith(f"{p}.") for part in parts)}


def _not_a_part(path: str, module: nn.Module, recording: _Recording) -> str | None:
    changing = [inner for inner in recording.changing if inner == path or inner.startswith(f"{path}.")]
    if changing:
        return f"a run changes Python attributes of {changing[0]}"
    if path in recording.transformed:
        return "a transform of torch.func runs it"
    if path in recording.filling:
        return "it changes a list or dictionary of its arguments"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks"
    return None


def _for_calls(path: str, module: nn.Module, calls: Sequence[Call], function: PartFunction[P]) -> P | str:
    """The result of `function` for the recorded calls, with sizes that vary if they do; or why it fails."""
    reason = ""
    for shapes in dict.fromkeys((_differing_sizes(module, calls) is not None, False)):
        try:
            outcome = function(path, module, calls[0], _differing_sizes(module, calls) if shapes else None)
        except IntarsiaError as error:
            reason = first_line(error)
            continue
        return outcome
    return reason


def _differing_sizes(module: nn.Module, calls: Sequence[Call]) -> Any:
    """`dynamic_shapes` for the sizes that differ between the calls; None if none does.

    Unlike those of `tuning.recorded`, sizes have no ranges: the calls are those of one run, and another call
    of the model may bring longer ones. Whole numbers stay fixed: of a module inside, they seldom are sizes.
    """
    flats = [pytree.tree_flatten((tuple(args), dict(kwargs))) for args, kwargs in calls]
    structure = flats[0][1]
    if any(other != structure for _, other in flats):
        return None
    shapes: list[Any] = []
    for same in zip(*(leaves for leaves, _ in flats), strict=True):
        if not all(isinstance(x, torch.Tensor) and _is_like(x, same[0]) for x in same):
            shapes.append(None)
            continue
        axes = [a for a in range(same[0].dim()) if len({int(x.shape[a]) for x in same}) > 1]
        shapes.append(dict.fromkeys(axes, Dim.AUTO) or None)
    if not any(shapes):
        return None
    args, kwargs = pytree.tree_unflatten(shapes, structure)
    bound = bound_arguments(module, args, kwargs)
    return None if bound is None else dict(bound.arguments)


def _is_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dim() == other.dim() and not tensor.is_nested  # the sizes of a nested tensor are no numbers


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _fault(partly: PartlyCompiled, call: Call, truth: Sequence[torch.Tensor]) -> str | None:
    args, kwargs = copied_call(call)
    try:
        with undisturbed(partly), kept_random_state():
            answer = _snapshot(partly(*args, **kwargs))
    except Exception as error:
        return f"it fails: {type(error).__name__}: {error}"
    return disagreement(answer, truth)


def _snapshot(value: Any) -> list[torch.Tensor]:
    """Copies of the tensors in a result, which may lie in buffers that are restored."""
    return [tensor.detach().clone() for tensor in _tensors(value)]


def _tensors(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """The tensors in a result of any kind, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        yield from _tensors(vars(value), depth - 1)


def names_within(model: nn.Module, path: str, names: Iterable[ModuleName]) -> tuple[ModuleName, ...]:
    """The names of modules, translated to names inside the part at `path`; \"\" means the whole part."""
    around = [".".join(path.split(".")[:depth]) for depth in range(len(path.split(".")) + 1)]
    inside = [(inner, type(part)) for inner, part in model.get_submodule(path).named_modules() if inner]
    inner_names: list[ModuleName] = []
    for name in names:
        means = module_test(name)
        if any(means(outer, type(model.get_submodule(outer))) for outer in around):
            inner_names.append("")
        inner_names += [inner for inner, kind in inside if means(f"{path}.{inner}", kind)]
    return tuple(dict.fromkeys(inner_names))


def check_names_of_parts(
    model: nn.Module,
    call: Call,
    graphs: Sequence[fx.GraphModule],
    options: PartitionOptions,
    engines: Sequence[str],
) -> None:
    """Raise `PartitionError` for a name of no module of the model, or of no operator that it runs."""
    check_engine_names(options, engines)
    kinds = {path: type(module) for path, module in model.named_modules()}
    for name in options.torch_executed_modules:
        means = module_test(name)
        if not any(means(path, kind) for path, kind in kinds.items()):
            names = [kind.__name__ for kind in kinds.values()]
            raise PartitionError(unknown_module(name, kinds, names, "which no module is"))
    check_op_names(graphs, options, lambda: _operators_run(model, call))


def _operators_run(model: nn.Module, call: Call) -> list[str]:
    """The operators that PyTorch runs for a call of the model."""
    copy = shared_copy(model)
    args, kwargs = copied_call(call)
    with undisturbed(copy), kept_random_state(), DispatchedOps() as ran:
        copy(*args, **kwargs)
    return [str(op) for op in ran.ops]

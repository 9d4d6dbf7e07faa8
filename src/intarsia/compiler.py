"""The whole flow: capture, lower, ask, partition, convert, rewrite, build, choose, stitch."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Unpack

from torch import fx, nn
from torch.export import ExportedProgram

from intarsia import archive as archive  # compiled modules are pickled through it
from intarsia.build.builder import Builder
from intarsia.build.cases import Cases
from intarsia.build.faithful import (
    Example,
    Faithful,
    error_of,
    examples_of,
    faithful_lowering,
    further_examples,
    judged_example,
    operators_of,
    suspects,
    whole_fault,
)
from intarsia.build.judge import Judge
from intarsia.build.part_names import check_names_of_parts, names_within
from intarsia.build.parts import CompileOne, compile_parts
from intarsia.build.refit import as_before, new_state, relowered
from intarsia.build.rewriter import rewriter
from intarsia.capture.autocast import refuse_autocast
from intarsia.capture.device import device_kind, device_of
from intarsia.capture.export import capture
from intarsia.capture.frozen_state import watched
from intarsia.capture.input import check_call, further_calls, resolve_call
from intarsia.capture.protect import undisturbed
from intarsia.capture.random_state import kept_random_state
from intarsia.choose.candidate import Workshop, sample_of
from intarsia.choose.choose import choose
from intarsia.choose.measured import Measured
from intarsia.choose.plan import EAGER
from intarsia.choose.precision import Precision, refuse_short_engines
from intarsia.choose.reuse import Earlier
from intarsia.choose.wishes import Wishes, wishes_of
from intarsia.choose.worth import is_measuring, may_favour_slow_engines, too_small_to_measure
from intarsia.convert import registry
from intarsia.engines import Engine, Program, resolve_engines, with_short_engines, with_unasked_engines
from intarsia.errors import CaptureError, InputError, IntarsiaError, LoweringError, PartitionError, RefitError
from intarsia.graph.devices import uses_gpu
from intarsia.lower import Lowered
from intarsia.lower.generalize import Call, lower_model
from intarsia.lower.lowered import example_inputs
from intarsia.partition import PartitionOptions, Piece, Plan, Strategy
from intarsia.partition.names import check_names
from intarsia.partition.options import PartitionChoices
from intarsia.partition.support import refused_table, support_table
from intarsia.rewrite import Patterns
from intarsia.runtime.compiled import Compiled, Refit, Source
from intarsia.runtime.cuda_graphs import use_cuda_graphs
from intarsia.runtime.inlay import Assembly
from intarsia.runtime.partly import PartlyCompiled

# torch.export traces with process-wide state: one model at a time. Compiled modules run while others compile.
COMPILING = threading.RLock()


def compile(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    engines: Sequence[Engine | str] | Engine | str | None = None,
    partition: str | Strategy | Measured | None = None,
    precision: Precision | None = None,
    tolerance: float | None = None,
    examples: Sequence[Sequence[Any]] = (),
    options: PartitionOptions | None = None,
    rewrite: Patterns = None,
    verify: bool = True,
    cuda_graphs: bool | Literal["static"] | None = None,
    build_limit_s: float | None = 600.0,
    fallback: Literal["parts", "eager", "error"] = "parts",
    **choices: Unpack[PartitionChoices],
) -> Compiled | PartlyCompiled:
    """Cut a model into pieces, give each to an engine that can run it, inlay them as one module.

    The module computes what the model does in evaluation, for inputs like `args` and `kwargs` (sizes
    named in `dynamic_shapes` may vary). Where no engine takes an operator, PyTorch runs it, and
    `plan` says why. With `verify` the model is run on the example inputs, and at the ends of sizes that vary:
    the graph made of it, every piece on its engine, and the whole must answer alike (see `compare`), or the
    nodes at fault, and at worst the model, stay in PyTorch. An engine that takes longer than `build_limit_s`
    seconds to answer, build or first run a piece is given up; its thread cannot be ended and is left behind.
    `rewrite` chooses patterns: None those measured to pay here, True all, False none, or a list of shipped
    names, patterns and managers; `RewritePatternManager.instance()` holds those applied with None and True.
    On a GPU the whole module runs as one CUDA graph where it can be recorded; `cuda_graphs=False` turns that
    off, and with "static" a call returns the graph's own memory, which the next call overwrites.
    A model that torch.export cannot take is compiled in parts: the submodules that can be captured, largest
    first, run compiled, the rest as it is, and `notes` say what and why; with `fallback="eager"` all of it
    runs as it is, with "error" it is refused.
    `partition` is `Measured()`, the name of a strategy, or one of your own. With `Measured()` every engine
    alone, other options and the model as it is are measured on this machine, and the best is taken (see
    `docs/choosing.md`). It is the default where neither engines nor their order are named, unless
    the model is too small for it to pay; otherwise each node goes to the first engine that takes it.
    Arithmetic is the model's own (`precision="fp32"`). With `tolerance=0.02` engines may use bf16, fp16,
    int8, or weights of 8 or 4 bits ("int8-weights", "int4-weights"; or only what `precision` names) where
    that is measured to be faster and the largest error of each result, on the example and on further
    `examples` of positional arguments, stays within that share of its largest value; blocks with the largest
    errors are kept exact, and the plan tells the error.
    `choices` are the fields of `PartitionOptions` (`min_block_size`, `torch_executed_ops`,
    `torch_executed_modules`, `require_full_compilation`, `atomic`, `memory_budget`, `backend_priority`,
    `backend_support_map`), given by name or together as `options`.

    >>> import torch, intarsia
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> fast = intarsia.compile(model, (torch.ones(1, 8),))
    >>> torch.allclose(fast(torch.ones(1, 8)), model(torch.ones(1, 8)), atol=1e-5)
    True
    """
    wishes, arithmetic = wishes_of(
        partition=partition,
        precision=precision,
        tolerance=tolerance,
        options=options,
        choices=choices,
        rewrite=rewrite,
        verify=verify,
        cuda_graphs=cuda_graphs,
        build_limit_s=build_limit_s,
        fallback=fallback,
        began=time.perf_counter(),
    )
    asked_to_measure = wishes.measured is not None
    unordered = engines is None and wishes.options.backend_priority is None
    open_order = partition is None and not arithmetic and unordered
    check_call(args, kwargs)
    with COMPILING, kept_random_state(), device_of(model, args, kwargs or {}):
        args, kwargs, dynamic_shapes = resolve_call(model, args, kwargs or {}, dynamic_shapes)
        device = device_kind(model, args, kwargs)
        refuse_autocast(device)
        if cuda_graphs is not None and cuda_graphs is not False and device != "cuda":
            raise InputError(
                f"cuda_graphs={cuda_graphs!r} needs a model on a CUDA device; this one is on {device}"
            )
        usable, notes = resolve_engines(engines, device)
        by_default = open_order and device in ("cpu", "cuda") and len(usable) > 1 and is_measuring()
        if by_default:
            wishes = replace(wishes, measured=Measured(), only_if_worth_it=device == "cpu")
        paying = by_default and (device == "cuda" or may_favour_slow_engines(model))
        if paying or (engines is None and asked_to_measure):
            usable = with_unasked_engines(usable, device)
        if wishes.measured is not None and not arithmetic:
            refuse_short_engines(usable)
        if arithmetic:
            usable, missing = with_short_engines(usable, arithmetic)
            notes += [f"{name} is not tried: {reason}" for name, reason in missing.items()]
        call = args, kwargs
        wishes = replace(wishes, more=further_calls(examples, kwargs))
        try:
            return _compile(model, call, dynamic_shapes, usable, wishes, [*notes])
        except (CaptureError, LoweringError) as error:
            if fallback == "error" or _must_be_whole(model, call, dynamic_shapes, wishes, error):
                raise
            graphs: list[fx.GraphModule] = []
            one = _part_compiler(model, usable, wishes, graphs) if fallback == "parts" else None
            made = compile_parts(model, call, str(error).splitlines()[0], one, notes)
            check_names_of_parts(model, call, graphs, wishes.options, [engine.name for engine in usable])
            return made


def _must_be_whole(
    model: nn.Module, call: Call, dynamic_shapes: Any, wishes: Wishes, error: IntarsiaError
) -> bool:
    """Whether a model that cannot be captured is refused: all of it was asked for, or only sizes fail."""
    if wishes.options.require_full_compilation or not isinstance(model, nn.Module):
        return True
    if dynamic_shapes is None or isinstance(error, LoweringError):
        return False  # a graph that torch cannot take apart says nothing against the sizes
    try:
        capture(model, *call)
    except CaptureError:
        return False
    return True


def _part_compiler(
    model: nn.Module, usable: Sequence[Engine], wishes: Wishes, graphs: list[fx.GraphModule]
) -> CompileOne:
    """Compiles a submodule by the ordinary flow; names that the user gave mean it as they mean the model.

    Names are checked when all parts are made, against the `graphs` of all.
    """

    def compile_one(path: str, module: nn.Module, call: Call, dynamic_shapes: Any) -> Compiled:
        inner = names_within(model, path, wishes.options.torch_executed_modules)
        options = replace(wishes.options, torch_executed_modules=inner)
        own = replace(wishes, options=options, graphs=graphs, began=time.perf_counter(), more=())
        return _compile(module, call, dynamic_shapes, usable, own, [])

    return compile_one


def _compile(
    model: nn.Module,
    call: Call,
    dynamic_shapes: Any,
    usable: Sequence[Engine],
    wishes: Wishes,
    notes: list[str],
) -> Compiled:
    def lower() -> tuple[Lowered, Call]:
        return lower_model(
            model, *call, dynamic_shapes, has_converter=registry.__contains__, drop_guards=wishes.verify
        )

    if not wishes.verify:
        with watched(model) as frozen:
            lowered, captured = lower()
        notes += frozen
        example = Example(captured, example_inputs(lowered, *captured))
        earlier = Earlier(model, lowered, [example], usable, wishes, notes)
        built = earlier.module_or(lambda: _built(model, lowered, usable, wishes, [example], notes, call))
        return _refittable(built, usable, wishes, [example])
    judge = Judge(model)
    with watched(judge.model) as frozen:
        truth = judge.answer_if_any(call)  # before anything else is done to the model
    notes += frozen
    lowered, captured = lower()
    judged = examples_of(judge, lowered, captured, call, truth, [])
    earlier = Earlier(model, lowered, judged, usable, wishes, notes)
    made = earlier.module()
    if made is not None:
        return _refittable(made, usable, wishes, judged)
    called = lambda: operators_of(capture(model, *call, dynamic_shapes).graph)  # noqa: E731
    found = faithful_lowering(judge, (lowered, captured), lower, called, call, truth, notes)
    if found.fault is not None:
        return _as_it_is(model, found, usable, wishes, notes)
    examples = [*found.examples, *further_examples(judge, found.lowered, wishes.more)]
    compiled = _built(model, found.lowered, usable, wishes, examples, notes, call)
    fault = whole_fault(judge, found.lowered, compiled, examples, *_slack(compiled, usable, wishes))
    if fault is None:
        earlier.keep(compiled, examples, verified=True)
        return _refittable(compiled, usable, wishes, examples)
    own = replace(wishes, measured=None)
    for refused, told in suspects(found.lowered.module.graph, compiled.plan, fault):
        compiled = _built(model, found.lowered, usable, own, examples, [*notes, told], refused=refused)
        slack = _slack(compiled, usable, wishes)
        if whole_fault(judge, found.lowered, compiled, examples, *slack) is None:
            return _refittable(compiled, usable, own, examples)
    return _as_it_is(model, replace(found, fault=fault), usable, wishes, notes)


def _slack(compiled: Compiled, usable: Sequence[Engine], wishes: Wishes) -> tuple[float, float | None]:
    """The coarsest rounding among the engines of a plan, and the tolerance, if one of them uses it."""
    engines = {name for plan in (compiled.plan, *compiled.body_plans.values()) for name in plan.engines}
    used = [engine for engine in usable if engine.name in engines]
    is_exact = all(engine.is_exact for engine in used)
    return max((engine.coarsest for engine in used), default=0.0), None if is_exact else wishes.tolerance


def _refittable(
    compiled: Compiled, usable: Sequence[Engine], wishes: Wishes, examples: Sequence[Example]
) -> Compiled:
    compiled.refit_by(refitting(usable, wishes, examples))
    return compiled


def refitting(usable: Sequence[Engine], wishes: Wishes, examples: Sequence[Example]) -> Refit:
    """What makes a module of other weights: lowered, cut and built as before, tried on the examples."""
    calls = [example.call for example in examples]
    comparable = all(example.truth is not None for example in examples)  # unless the model draws lots
    plans: list[Plan] = []  # of the compile: what some weights could not have, the next may

    def refitted(old: Compiled, weights: Mapping[str, Any] | nn.Module) -> Compiled:
        state = new_state(old.state_dict(), weights)
        model = weights if isinstance(weights, nn.Module) else None
        lowered = relowered(old.lowered, state, model, registry.__contains__)
        again = [Example(call, example_inputs(lowered, *call)) for call in calls]
        plans.extend([] if plans else [old.plan, *old.body_plans.values()])
        own = replace(wishes, strategy=as_before(plans, wishes.strategy), measured=None)
        own = replace(own, only_if_worth_it=False)  # the plan names its engines
        made = _built(model, lowered, usable, own, again, ())
        made.refit_from(old, state)
        if model is not None and comparable:
            judge = Judge(model)
            judged = [judged_example(judge, lowered, example) for example in again]
            fault = whole_fault(judge, lowered, made, judged, *_slack(made, usable, wishes))
            if fault is not None:
                raise RefitError(f"with these weights the compiled module {fault}; compile the model again")
        made.refit_by(refitted)
        return made

    return refitted


def _built(
    model: nn.Module | None,
    lowered: Lowered,
    usable: Sequence[Engine],
    wishes: Wishes,
    examples: Sequence[Example],
    notes: Sequence[str],
    call: Call = ((), {}),
    as_it_is: str | None = None,
    refused: Mapping[fx.Node, Mapping[str, str]] = MappingProxyType({}),
) -> Compiled:
    """The pieces of a graph on engines, inlaid as one module; each tried on the examples, if asked for.

    Who runs what is measured, if that was asked for; a model that runs `as_it_is` leaves nothing to choose.
    """
    if wishes.graphs is not None:
        wishes.graphs.append(lowered.module)
    else:
        check_names(lowered.module, wishes.options, [engine.name for engine in usable])
    measured = wishes.measured if as_it_is is None else None
    if measured is not None and wishes.only_if_worth_it:
        small = too_small_to_measure(lowered.module)
        measured, notes = (measured, notes) if small is None else (None, [*notes, small])
    if measured is None and wishes.only_if_worth_it:  # nobody asked for those that are slow to build
        usable = [engine for engine in usable if not engine.slow_to_build]
    on_gpu = uses_gpu(lowered.module.graph)
    builder = Builder(
        lowered.module,
        usable,
        wishes.options,
        wishes.strategy,
        rewrite=None
        if wishes.rewrite is False
        else rewriter(wishes.rewrite, usable, "cuda" if on_gpu else "cpu"),
        examples=[example.inputs for example in examples] if wishes.verify else (),
        build_limit_s=wishes.build_limit_s,
        cases=Cases(lowered.module, [example.case for example in examples]),
        tolerance=wishes.tolerance,
    )
    if as_it_is is None:
        table = support_table(lowered.module, usable, wishes.build_limit_s).with_refusals(refused)
    else:
        table = refused_table(lowered.module, [engine.name for engine in usable], as_it_is)
    eager_for: Literal["chosen", "required"] | None = "chosen" if as_it_is == EAGER else "required"
    eager_for = None if as_it_is is None else eager_for
    signature = inspect.signature(model.forward) if isinstance(model, nn.Module) else None
    own = model.module() if isinstance(model, ExportedProgram) else model

    def finish(
        plan: Plan, pieces: Sequence[Piece], programs: Sequence[Program], builder: Builder
    ) -> Compiled:
        told = [*notes, *lowered.notes, *builder.notes]
        compiled = Compiled(
            lowered,
            Assembly(plan, pieces, programs, builder.body_plans),
            Source(own, signature, eager=eager_for),
            told,
        )
        if on_gpu and examples and wishes.cuda_graphs is not False:  # the model as it is has none
            use_cuda_graphs(
                compiled,
                lowered.module.graph,
                capturable=all(engine.capturable for engine in usable if engine.name in plan.engines),
                results="static" if wishes.cuda_graphs == "static" else "fresh",
                example=examples[0].inputs,
            )
        return compiled

    if measured is None:
        return finish(*builder.run(table), builder)

    def eager() -> Compiled:
        return _built(model, lowered, usable, wishes, [], notes, as_it_is=EAGER)

    sample = sample_of(examples, call, largest=measured.objective == "throughput")
    told = f"{wishes.rewrite} {wishes.verify} {wishes.cuda_graphs}"
    error = partial(error_of, lowered, examples)
    workshop = Workshop(builder, table, finish, eager, error, wishes.rewrite is None, wishes.began)
    with undisturbed(own) if isinstance(own, nn.Module) else nullcontext():  # it is measured as it is, too
        return choose(measured, workshop, usable, sample, told, wishes.tolerance)


def _as_it_is(
    model: nn.Module, found: Faithful, usable: Sequence[Engine], wishes: Wishes, notes: Sequence[str]
) -> Compiled:
    """The model itself, run in PyTorch: what was made of it does not answer as it does."""
    if wishes.options.require_full_compilation:
        raise PartitionError(f"full compilation is impossible: compiled, the model {found.fault}")
    reason = f"the model runs as it is, in PyTorch: compiled, it {found.fault}"
    return _built(model, found.lowered, usable, wishes, [], [*notes, reason], as_it_is=reason)

"""`intarsia.compile` with checked options: the compile job, and what it returns if the job cannot be done.

A model that cannot be captured as a whole is compiled in parts, each by a job of its own. After an unexpected
error, the model runs as it is, with a warning. A model in training mode is compiled as in evaluation; a
warning says if its answers in training differ.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call, copied_call, device_of
from intarsia.capture.export import capture
from intarsia.capture.input import check_call
from intarsia.capture.output_objects import open_objects
from intarsia.capture.protect import kept_random_state, shared_copy
from intarsia.compare import disagreement
from intarsia.compiler.job import CompileJob, Request, prepare
from intarsia.compiler.parts import check_names_of_parts, compile_parts, names_within
from intarsia.errors import (
    CaptureError,
    DifferenceWarning,
    EngineError,
    InputError,
    IntarsiaError,
    InternalError,
    LoweringError,
    PartitionError,
    RefitError,
    RewriteError,
    UnrepeatableError,
    error_text,
    first_line,
    warn,
)
from intarsia.logs import torch_logs_kept
from intarsia.options import CompileOptions
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.forwards import PartlyCompiled

# torch.export traces with process-wide state: one model at a time. Compiled modules run while others compile.
COMPILING = threading.RLock()


def compile_with(
    options: CompileOptions,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Compiled | PartlyCompiled:
    """Compile a model. After an unexpected error, return it as it is, with a warning."""
    try:
        compiled, call = _compile(options, model, args, kwargs or {}, dynamic_shapes)
    except InternalError as error:
        if options.is_strict:
            raise (error.__cause__ or error) from None
        warn(f"the model runs as it is, in PyTorch: {error}")
        return model_as_it_is(model, str(error))
    try:
        with COMPILING, kept_random_state():
            training = training_difference(model, call)
    except Exception as error:
        if options.is_strict:
            raise
        training = f"unexpected error where training is compared with evaluation: {internal_error(error)}"
    if training is not None:
        warn(training, DifferenceWarning)
    for difference in compiled.differences:
        warn(f"the compiled module can answer differently from the model: {difference}", DifferenceWarning)
    return compiled


def compile_whole(
    options: CompileOptions,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Compiled:
    """Compile a model as a whole. An IntarsiaError is raised, and the caller runs the model instead."""
    compiled, _ = _compile(replace(options, fallback="error"), model, args, kwargs or {}, dynamic_shapes)
    assert isinstance(compiled, Compiled)
    return compiled


def _compile(
    options: CompileOptions,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> tuple[Compiled | PartlyCompiled, Call]:
    """The compiled model, whole or in parts, and its example call, in which every `Input` is drawn.

    An exception of another package becomes an InternalError.
    """
    began = time.perf_counter()
    check_call(model, args, kwargs)
    try:
        with COMPILING, torch_logs_kept(), kept_random_state(), device_of(model, args, kwargs):
            job = prepare(options, model, args, kwargs, dynamic_shapes, began)
            try:
                return job.run(), job.request.call
            except (CaptureError, LoweringError) as error:
                if _must_be_whole(job, error):
                    raise
                return in_parts(job, first_line(error)), job.request.call
    except Exception as error:
        if is_for_user(error):
            raise
        raise internal_error(error) from error


def _must_be_whole(job: CompileJob, error: IntarsiaError) -> bool:
    """Whether the error is raised, because the user wants the whole model or because only its sizes fail."""
    if job.options.is_strict:
        return True
    if not isinstance(job.model, nn.Module):
        return True
    if job.request.dynamic_shapes is None or isinstance(error, LoweringError | UnrepeatableError):
        return False  # that torch cannot decompose a graph says nothing about the sizes
    try:
        capture(job.model, *copied_call(job.request.call))  # a copy: export changes its arguments
    except CaptureError:
        return False
    return True


def in_parts(job: CompileJob, reason: str) -> PartlyCompiled:
    """The model with the submodules compiled that can be captured; the rest runs in PyTorch."""
    assert isinstance(job.model, nn.Module)
    graphs: list[fx.GraphModule] = []
    compile_one = partial(_compile_part, job, graphs) if job.options.fallback == "parts" else None
    partly = compile_parts(job.model, job.request.call, reason, compile_one, job.request.notes)
    names = [engine.name for engine in job.engines]
    check_names_of_parts(job.model, job.request.call, graphs, job.options.limits, names)
    return partly


def _compile_part(
    whole: CompileJob,
    graphs: list[fx.GraphModule],
    path: str,
    module: nn.Module,
    call: Call,
    dynamic_shapes: Any,
) -> Compiled:
    """Compile one submodule. `torch_executed_modules` is translated to names inside it."""
    assert isinstance(whole.model, nn.Module)
    limits, accuracy = whole.options.limits, whole.options.accuracy
    inner = names_within(whole.model, path, limits.torch_executed_modules)
    options = replace(
        whole.options,
        limits=replace(limits, torch_executed_modules=inner),
        accuracy=replace(accuracy, examples=()),
    )
    request = Request(call, dynamic_shapes)
    part = replace(whole, model=module, request=request, options=options, part_graphs=graphs)
    try:
        return part.run()
    except Exception as error:
        if is_for_user(error):
            raise
        unexpected = internal_error(error)
        warn(f"{path} runs as it is, in PyTorch: {unexpected}")
        raise unexpected from error


# Errors about the call, the options or the model, which the user can correct.
_FOR_USER = (CaptureError, InputError, LoweringError, PartitionError, RefitError, RewriteError)
_STAGES = (
    *("prepare", "capture", "lower", "cache_entry", "check", "support", "build", "choose", "verify", "store"),
    *("finish", "in_parts"),
)
_PACKAGE = Path(__file__).parents[1]
_STAGE_FILES = (str(_PACKAGE / "compiler" / "job.py"), __file__)


def is_for_user(error: Exception) -> bool:
    """Whether the user can act on an error of a compile; other errors are defects of Intarsia."""
    is_missing = isinstance(error, EngineError) and _stage_of(error) == "prepare"  # an engine that was named
    return is_missing or isinstance(error, _FOR_USER)


def _stage_of(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (f.name for f in reversed(frames) if f.filename in _STAGE_FILES and f.name in _STAGES), "prepare"
    )


def internal_error(error: Exception) -> InternalError:
    """What failed, in which stage of a compile, and at which line of this package."""
    if isinstance(error, InternalError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    where = f" at {Path(ours[-1].filename).relative_to(_PACKAGE.parent)}:{ours[-1].lineno}" if ours else ""
    return InternalError(f"unexpected error in stage {_stage_of(error)!r}{where}: {error_text(error)}")


def model_as_it_is(model: nn.Module | ExportedProgram, reason: str) -> PartlyCompiled:
    """The model itself, run in PyTorch as in evaluation, with the plan and the notes of a compiled module."""
    module = model.module() if isinstance(model, ExportedProgram) else model
    notes = [f"the whole model runs as it is, in PyTorch: {reason}"]
    return PartlyCompiled(shared_copy(module), {}, notes, reason, module)


# Modules whose `forward` depends on the mode. The warning names them; running the model decides.
_MODE_DEPENDENT = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase)


def training_difference(model: Any, call: Call) -> str | None:
    """How a model in training mode answers differently than in evaluation; None if it does not."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return None
    if not any(module.training for module in model.modules()):
        return None
    try:
        evaluated = _answer(model, call, training=False)
    except Exception:  # the model fails on the example; the compile has reported it
        return None
    try:
        mismatch = disagreement(_answer(model, call, training=True), evaluated)
        difference = None if mismatch is None else mismatch.replace("PyTorch", "evaluation")
    except Exception as error:
        difference = f"it fails: {error_text(error)}"
    if difference is None:
        return None
    kinds = Counter(
        type(m).__name__ for m in model.modules() if m.training and isinstance(m, _MODE_DEPENDENT)
    )
    names = f" ({', '.join(f'{name} x{count}' for name, count in kinds.items())})" if kinds else ""
    return (
        f"the model is in training mode{names}; the compiled module computes what it does in evaluation. In"
        f" training, {difference}. Call model.eval() before you compile it"
    )


def _answer(model: nn.Module, call: Call, *, training: bool) -> list[Any]:
    args, kwargs = copied_call(call)
    copy = shared_copy(model)  # with buffers of its own: compiled modules notice writes to the model's
    for twin, module in zip(copy.modules(), model.modules(), strict=True):
        twin.training = module.training and training
        twin._buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        leaves = pytree.tree_leaves(open_objects(copy(*args, **kwargs)))
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

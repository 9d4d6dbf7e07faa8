"""Errors that a compile should not meet: what they are told as, and what the user gets instead."""

from __future__ import annotations

import traceback
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from intarsia.capture.protect import shared_copy
from intarsia.errors import (
    CaptureError,
    EngineError,
    InputError,
    InternalError,
    LoweringError,
    PartitionError,
    RefitError,
    RewriteError,
)
from intarsia.runtime.partly import PartlyCompiled

# What is wrong with a call, with an option, or with the model; of other errors the user is not the author.
_FOR_USER = (CaptureError, InputError, LoweringError, PartitionError, RefitError, RewriteError)
_STAGES = (
    *("prepare", "capture", "lower", "cache_entry", "check", "support", "build", "choose", "verify", "store"),
    *("finish", "in_parts"),
)
_PACKAGE = Path(__file__).parents[1]
_JOB = str(_PACKAGE / "compiler" / "job.py")


def is_for_user(error: Exception) -> bool:
    """Whether an error of a compile tells the user what to change; any other is ours."""
    is_missing = isinstance(error, EngineError) and _stage_of(error) == "prepare"  # an engine that was named
    return is_missing or isinstance(error, _FOR_USER)


def _stage_of(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.name for f in reversed(frames) if f.filename == _JOB and f.name in _STAGES), "prepare")


def internal_error(error: Exception) -> InternalError:
    """What failed, in which stage of a compile, and at which line of this package."""
    if isinstance(error, InternalError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    where = f" at {Path(ours[-1].filename).relative_to(_PACKAGE.parent)}:{ours[-1].lineno}" if ours else ""
    reason = next(iter(str(error).splitlines()), "")
    return InternalError(
        f"unexpected error in stage {_stage_of(error)!r}{where}: {type(error).__name__}: {reason}"
    )


def model_as_it_is(model: nn.Module | ExportedProgram, reason: str) -> PartlyCompiled:
    """The model itself, run in PyTorch as in evaluation, with the plan and the notes of a compiled module."""
    module = model.module() if isinstance(model, ExportedProgram) else model
    return PartlyCompiled(shared_copy(module), {}, [f"all of it runs as it is, in PyTorch: {reason}"], reason)

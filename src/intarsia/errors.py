"""The errors and warnings of the package."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent)
_CALLS = "torch.nn.modules.module"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn the user at the innermost line of the call stack that is not in this package.

    A module is called through `nn.Module.__call__`, which is not the user's line either.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_globals.get("__name__") == _CALLS
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has none.

    >>> first_line(ValueError("too long\\nby 3"))
    'too long'
    """
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def error_text(error: BaseException) -> str:
    """The class of an error and the first line of its message.

    >>> error_text(ValueError("too long\\nby 3"))
    'ValueError: too long'
    """
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def near_names(name: object, known: Iterable[str], most: int = 3) -> str:
    """The end of a message: the known names that are spelled much like this one; empty if there are none.

    >>> near_names("brt", ["bert", "vit"])
    "; did you mean 'bert'?"
    """
    near = get_close_matches(str(name), sorted(set(known)), n=most)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def some_of(names: Iterable[str], most: int = 3) -> str:
    """The first names as text, and the number of the others.

    >>> some_of(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    first = [*map(str, names)]
    more = f" and {len(first) - most} more" if len(first) > most else ""
    return ", ".join(first[:most]) + more


def count_text(count: int, noun: str) -> str:
    """A number of things as text.

    >>> count_text(1, "node"), count_text(2, "node")
    ('1 node', '2 nodes')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def range_text(low: Any, high: Any) -> str:
    """A range of sizes as text. Torch's ranges without an upper end have infinities of several kinds.

    >>> range_text(1, 8), range_text(1, float("inf"))
    ('1 to 8', '1 or more')
    """
    return f"{low} to {high}" if high < 2**31 - 1 else f"{low} or more"


class IntarsiaError(Exception):
    """The base class of the errors of this package."""


class InternalError(IntarsiaError):
    """An unexpected failure inside Intarsia or torch. The message says what failed, and where."""


class DifferenceWarning(UserWarning):
    """A compiled module may answer differently from the model. The message says when, and how to avoid it."""


class CaptureError(IntarsiaError):
    """The model cannot be captured as a graph."""


class UnrepeatableError(CaptureError):
    """The model has an effect that its graph would not repeat, such as seeding a generator."""


class LoweringError(IntarsiaError):
    """A decomposition or a pass over the graph is wrong, or it broke the graph."""


class ConversionError(IntarsiaError):
    """A node cannot be converted to layers. The message is the reason."""


class NetworkError(IntarsiaError):
    """A layer network is invalid, or an edit would make it invalid."""


class EngineError(IntarsiaError):
    """An engine cannot build a piece, or failed to run it."""


class GuardError(EngineError):
    """A call has values that the engine treats differently from PyTorch. PyTorch answers it."""


class PartitionError(IntarsiaError):
    """A plan or an option is invalid, or `require_full_compilation` cannot be met."""


class UnknownNameError(PartitionError):
    """An option names an operator or a module that the graph does not have."""

    def __init__(self, message: str, option: str, name: object) -> None:
        super().__init__(message)
        self.option: str = option
        self.name: object = name


class InputError(IntarsiaError, ValueError):
    """An argument is wrong, or a compiled module was called with inputs that it was not compiled for."""


class OptionError(InputError, TypeError):
    """A function does not have an option of this name."""


class StaleWeightsError(IntarsiaError):
    """A weight of the model has changed since the model was compiled."""


class ArchiveError(IntarsiaError):
    """A compiled module cannot be saved, or a file cannot be loaded."""


class RefitError(IntarsiaError):
    """New weights do not fit a compiled module."""


class RewriteError(IntarsiaError):
    """A rewriting pattern broke the network, does not end, or was registered wrongly."""


class PipelineError(IntarsiaError):
    """A pipeline stopped: a stage failed, or another process was lost."""


def check_option_names(names: Iterable[str], known: Iterable[str], function: str) -> None:
    """Raise OptionError, with near names, for a keyword that the function does not have.

    >>> check_option_names(["sed"], ["seed", "mesh"], "distributed")
    Traceback (most recent call last):
    ...
    intarsia.errors.OptionError: distributed has no option 'sed'; did you mean 'seed'?
    """
    known = list(known)
    for name in names:
        if name not in known:
            hint = near_names(name, known, most=1) or f"; known are {', '.join(known)}"
            raise OptionError(f"{function} has no option {name!r}{hint}")

"""What can go wrong, in the user's words."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn the user at the innermost line of a call that is not this package's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class IntarsiaError(Exception):
    """The root of every error this package raises on purpose."""


class InternalError(IntarsiaError):
    """Something failed inside Intarsia or torch that should not; the message says what, when and where."""


class DifferenceWarning(UserWarning):
    """A compiled module can answer differently from the model; the message says when, and how to avoid it."""


class CaptureError(IntarsiaError):
    """The model could not be turned into a graph."""


class UnrepeatableError(CaptureError):
    """A run of the model does what a graph of it does not repeat, such as seeding a generator."""


class LoweringError(IntarsiaError):
    """A decomposition or a pass over the graph was set up wrongly or broke the graph."""


class ConversionError(IntarsiaError):
    """A node could not be turned into layers; the message is the reason."""


class NetworkError(IntarsiaError):
    """A layer network is malformed, or an edit would make it so."""


class EngineError(IntarsiaError):
    """An engine refused to build or failed to run a piece."""


class GuardError(EngineError):
    """A call's values are outside what an engine answers rightly; PyTorch has to answer it."""


class PartitionError(IntarsiaError):
    """A plan is invalid, or full compilation was asked for and is impossible."""


class UnknownNameError(PartitionError):
    """An option names an operator or a module that the graph does not have."""

    def __init__(self, message: str, option: str, name: object) -> None:
        super().__init__(message)
        self.option: str = option
        self.name: object = name


class InputError(IntarsiaError, ValueError):
    """A compiled module was called with something it was not compiled for."""


class StaleWeightsError(IntarsiaError):
    """A weight of the model was written to after the model was compiled."""


class ArchiveError(IntarsiaError):
    """A compiled module cannot be saved, or a file is damaged, forged, too new, or none of ours."""


class RefitError(IntarsiaError):
    """New weights do not fit a compiled module."""


class RewriteError(IntarsiaError):
    """A rewriting pattern broke the network, loops, or was registered wrongly."""


class PipelineError(IntarsiaError):
    """A pipeline could not go on: a stage failed, or another process was lost."""

"""Noticing the gradient checkpointing of a model itself, which tracing would omit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch import nn

_FILE = torch.utils.checkpoint.__file__


@contextmanager
def checkpointed_modules(model: nn.Module) -> Iterator[list[str]]:
    """Gives a list, of the outermost modules that are called inside `torch.utils.checkpoint`, by name.

    What a checkpoint computes beside calls of modules has no name, and is not noticed. Meanwhile reentrant
    checkpoints compute as if there were none: they run without gradients, which export would take for the
    model's wish.
    """
    found: list[str] = []

    def before(name: str) -> None:
        if not any(name == outer or name.startswith(f"{outer}.") for outer in found) and _inside(
            sys._getframe(1)
        ):
            found.append(name)

    reentrant = torch.utils.checkpoint.CheckpointFunction
    with ExitStack() as stack:
        torch.utils.checkpoint.CheckpointFunction = _Transparent  # type: ignore[misc,assignment]
        stack.callback(setattr, torch.utils.checkpoint, "CheckpointFunction", reentrant)
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_pre_hook(lambda *_, name=name: before(name))
                stack.callback(hook.remove)
        yield found


class _Transparent:
    """What `torch.utils.checkpoint` calls when it is reentrant; a test notices if that changes."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """The function's answer."""
        return function(*args)


def _inside(frame: FrameType | None) -> bool:
    """Whether `torch.utils.checkpoint` is among the callers."""
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            return True
        frame = frame.f_back
    return False

"""The thread-local state of torch that a worker thread takes over from its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Autocast is kept per device type; these are the ones a stage can run on.
_AUTOCAST_DEVICES = ("cpu", "cuda")
SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, inference mode, autocast, default device and saved-tensor hooks, when captured.

    >>> with torch.no_grad():
    ...     state = ThreadState.capture()
    >>> with state.enter():
    ...     torch.is_grad_enabled()
    False
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device
    saved_tensor_hooks: SavedTensorHooks | None

    @staticmethod
    def capture() -> ThreadState:
        """The state of the calling thread."""
        return ThreadState(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _AUTOCAST_DEVICES
            ),
            default_device=torch.get_default_device(),
            saved_tensor_hooks=saved_tensor_hooks(),
        )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Take the state over for a while."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind) or enabled:
                    # Autocast's cache of weights is one for all threads, and a weight cast under
                    # checkpointing (without a graph) would cut the gradient of the next micro-batch.
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            yield


def saved_tensor_hooks() -> SavedTensorHooks | None:
    """The hooks that pack what autograd saves on this thread (`save_on_cpu`, say)."""
    # torch has no public way to ask; a release without this one leaves workers without the hooks.
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: SavedTensorHooks | None = None if ask is None else ask(False)
    return hooks

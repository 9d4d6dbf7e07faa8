"""What surrounds the builds of engines: files of weights that programs share, and a limit on the time."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import cached_property
from typing import Any, TypeVar

import torch

from intarsia.errors import EngineError

T = TypeVar("T")


class SharedWeights:
    """A folder for packed weights, and where each lies in it, by its contents."""

    def __init__(self, cleanup: ExitStack) -> None:
        self._cleanup = cleanup
        self.places: dict[bytes, Any] = {}
        self.problem: str | None = None  # why no more weights are written
        self.lock = threading.Lock()  # a file is loaded by two threads

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user."""
        return () if self.problem is None else (f"programs do not share packed weights: {self.problem}",)

    @cached_property
    def folder(self) -> str:
        """The folder, which is made when it is needed."""
        # Windows does not delete mapped files. Other systems keep their contents as long as they are mapped.
        folder = tempfile.TemporaryDirectory(prefix="intarsia_weights_", ignore_cleanup_errors=True)
        return self._cleanup.enter_context(folder)


_shared: ContextVar[SharedWeights | None] = ContextVar("shared weights", default=None)


@contextmanager
def sharing_weights() -> Iterator[SharedWeights]:
    """A block in which engines may put packed weights into files, which the programs of the block share."""
    with ExitStack() as cleanup:
        shared = SharedWeights(cleanup)
        token = _shared.set(shared)
        try:
            yield shared
        finally:
            _shared.reset(token)


def shared_weights() -> SharedWeights | None:
    """The files of the block that runs; None outside a block."""
    return _shared.get()


class OutOfTime(EngineError):
    """An engine that did not return in time; it continues in a separate thread."""


def within(seconds: float | None, what: str, work: Callable[[], T]) -> T:
    """What `work` gives, or OutOfTime after so many seconds; None waits for good, in this thread.

    Python cannot end a thread. An engine that hangs keeps its thread, and what memory it took, until the
    process ends; the thread is a daemon, so it does not keep the process alive.
    """
    if seconds is None:
        return work()
    results: list[T] = []
    failed: list[BaseException] = []
    threads, grad, inference = (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )
    on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if on_gpu else None
    context = copy_context()

    def run() -> None:
        try:
            if torch.get_num_threads() != threads:  # what belongs to a thread is as it is in the caller's
                torch.set_num_threads(threads)
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
                results.append(context.run(work))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=f"intarsia: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise OutOfTime(f"{what} did not end within {seconds:g} s; it is left running")
    if failed:
        raise failed[0]
    return results[0]

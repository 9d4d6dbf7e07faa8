"""A limit on how long an engine may take: the wait ends, and the engine is abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

import torch

from intarsia.errors import EngineError

T = TypeVar("T")


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

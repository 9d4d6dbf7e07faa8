"""One worker thread a stage: it takes tasks from its queue until it is told to stop."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from intarsia.pipeline.gpipe.microbatch import Batch


@dataclass(frozen=True)
class Task:
    """The work of one stage on one micro-batch."""

    micro_batch: int
    stage: int
    compute: Callable[[], Batch]


@dataclass(frozen=True)
class TaskResult:
    """What came of a task: a batch, or the exception that ended it."""

    task: Task
    result: Batch | BaseException


def run_task(task: Task) -> TaskResult:
    """Run a task; whatever it raises is part of the answer, so that no thread dies with it."""
    try:
        return TaskResult(task, task.compute())
    except BaseException as error:
        error.add_note(f"in stage {task.stage} of the pipeline, on micro-batch {task.micro_batch}")
        return TaskResult(task, error)


def _work(
    tasks: SimpleQueue[Task | None], report: Callable[[TaskResult], None], prepare: Callable[[], None]
) -> None:
    prepare()
    while (task := tasks.get()) is not None:
        report(run_task(task))
        del task  # its tensors must not live until the next one comes


@contextmanager
def spawn_workers(
    count: int, report: Callable[[TaskResult], None], prepare: Callable[[], None] = lambda: None
) -> Iterator[list[SimpleQueue[Task | None]]]:
    """Start workers, hand out a task queue for each, and end them all; they report what became of tasks.

    >>> done = SimpleQueue()
    >>> with spawn_workers(1, done.put) as [tasks]:
    ...     tasks.put(Task(0, 0, lambda: Batch(1)))
    >>> done.get().result.value
    1
    """
    queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(count)]
    threads = []
    for j, queue in enumerate(queues):
        # Context variables follow the caller as torch's own state does.
        context = contextvars.copy_context()
        # A daemon cannot keep the interpreter alive when the caller is interrupted twice.
        threads.append(
            threading.Thread(
                target=context.run, args=(_work, queue, report, prepare), name=f"stage {j}", daemon=True
            )
        )
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        yield queues
    finally:
        for queue in queues:
            queue.put(None)
        for thread in started:
            thread.join()

"""Requests that wait for the module: bounded, joined into batches, answered each by itself.

One thread runs the module: engines use all cores in a call. Requests are checked alone before they are
joined, since two rows of one input and three of another make a valid batch with a request that has the
reverse. A failed batch is run again request by request: only the model knows which one is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from intarsia.errors import error_text
from intarsia.serve.batching import Batching, joined, split
from intarsia.serve.interface import Interface

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own: where several workers add up their figures


class Metrics:
    """The figures of one server process; with several workers, of all of them."""

    requests: Counter
    split: Counter
    gone: Counter

    def __init__(self, in_flight: Callable[[], float], fallen_back: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        several = SHARED in os.environ
        own = CollectorRegistry() if several else self._registry
        self.requests = Counter("intarsia_requests_total", "answers by HTTP status", ["status"], registry=own)
        self.split = Counter(
            "intarsia_split_batches_total", "batches that failed and ran apart", registry=own
        )
        self.gone = Counter(
            "intarsia_gone_clients_total", "clients that left before their answer", registry=own
        )
        self._seconds = Histogram(
            "intarsia_request_seconds", "from the request to its answer", registry=own, buckets=_SECONDS
        )
        self._waited = Histogram("intarsia_queue_seconds", "in the queue", registry=own, buckets=_SECONDS)
        self._ran = Histogram("intarsia_call_seconds", "calls of the module", registry=own, buckets=_SECONDS)
        self._rows = Histogram("intarsia_batch_rows", "rows in a call", registry=own, buckets=_ROWS)
        in_flight_now = Gauge(
            "intarsia_in_flight", "requests taken and not answered", registry=own, multiprocess_mode="livesum"
        )
        segments = Gauge(
            "intarsia_fallen_back", "segments whose engine failed", registry=own, multiprocess_mode="livemax"
        )
        if several:
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        self._gauges = ((in_flight_now, in_flight), (segments, fallen_back))

    def answered(self, status: int, seconds: float) -> None:
        self.requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def waited(self, seconds: float) -> None:
        self._waited.observe(seconds)

    def ran(self, rows: int, seconds: float) -> None:
        self._rows.observe(rows)
        self._ran.observe(seconds)

    def text(self) -> bytes:
        """All figures in Prometheus's text format."""
        for gauge, read in self._gauges:
            gauge.set(read())
        return generate_latest(self._registry)


Outputs = dict[str, Any]


@dataclass(eq=False)
class Job:
    """One request: its flat inputs, and the future that its client waits for."""

    inputs: list[Any]
    done: asyncio.Future[Outputs]
    born: float = field(default_factory=time.monotonic)

    @property
    def rows(self) -> int:
        return next((int(v.shape[0]) for v in self.inputs if isinstance(v, torch.Tensor) and v.dim()), 1)

    def fits(self, other: Job) -> bool:
        """Whether they differ in nothing but rows; a request's own inputs were checked before."""
        return all(
            a.shape[1:] == b.shape[1:]
            for a, b in zip(self.inputs, other.inputs, strict=True)
            if isinstance(a, torch.Tensor)
        )


class Queue:
    """Jobs in the order they came, run one batch at a time in a thread of its own."""

    def __init__(self, interface: Interface, batching: Batching, wait_s: float, metrics: Metrics) -> None:
        self._interface = interface
        self.batching: Batching = batching
        self._wait_s = wait_s
        self._metrics = metrics
        self._waiting: deque[Job] = deque()
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "intarsia-model")
        self._worker: asyncio.Task[None] | None = None
        self._mean_s = 0.0  # of a call, for Retry-After
        self.running_since: float | None = None
        self._printed: set[str] = set()  # what was printed of batches that failed

    def start(self) -> None:
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self, limit_s: float) -> None:
        """Answer what waits, then end the thread; a call that takes longer than the limit is abandoned."""
        end = time.monotonic() + limit_s
        while (self._waiting or self.running_since is not None) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._thread.shutdown(wait=self.running_since is None, cancel_futures=True)

    def put(self, inputs: list[Any]) -> asyncio.Future[Outputs]:
        """The answer to come; cancel it, and the job is not run unless it already is."""
        job = Job(inputs, asyncio.get_running_loop().create_future())
        job.done.add_done_callback(lambda done: self._forget(job) if done.cancelled() else None)
        self._waiting.append(job)
        self._came.set()
        return job.done

    def _forget(self, job: Job) -> None:
        """Its client has gone: what it sent must not stay here until its turn comes."""
        with contextlib.suppress(ValueError):  # it is being run
            self._waiting.remove(job)

    def wait_s(self) -> float:
        """About how long a request that comes now would wait."""
        calls = -(-len(self._waiting) // max(1, self.batching.rows))
        return self._mean_s * (calls + 1)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            jobs = await self._next()
            if not jobs:
                continue
            self.running_since = time.monotonic()
            try:
                answers = await loop.run_in_executor(self._thread, self._run, jobs)
            except Exception as error:  # nothing in `_run` should raise, but nobody may wait for ever
                answers = [error] * len(jobs)
            took = time.monotonic() - self.running_since
            self._mean_s = took if not self._mean_s else 0.9 * self._mean_s + 0.1 * took
            self.running_since = None
            self._metrics.ran(sum(job.rows for job in jobs), took)
            for job, answer in zip(jobs, answers, strict=True):
                if job.done.done():  # its client has gone
                    continue
                if isinstance(answer, BaseException):
                    job.done.set_exception(answer)
                else:
                    job.done.set_result(answer)

    async def _next(self) -> list[Job]:
        """The oldest job and those that can go with it, once they are enough or it has waited enough."""
        while True:
            self._came.clear()
            while self._waiting and self._waiting[0].done.done():
                self._waiting.popleft()
            if not self._waiting:
                await self._came.wait()
                continue
            jobs, full = self._together()
            left = self._waiting[0].born + self._wait_s - time.monotonic()
            if full or left <= 0:
                break
            try:
                async with asyncio.timeout(left):
                    await self._came.wait()
            except TimeoutError:
                jobs, _ = self._together()
                break
        taken = set(map(id, jobs))
        self._waiting = deque(job for job in self._waiting if id(job) not in taken)
        for job in jobs:
            self._metrics.waited(time.monotonic() - job.born)
        return jobs

    def _together(self) -> tuple[list[Job], bool]:
        """Those that would share the next call, and whether no other could join them."""
        first = next((job for job in self._waiting if not job.done.done()), None)
        if first is None:
            return [], True
        rows = first.rows
        if rows >= self.batching.rows:  # also where batching is off
            return [first], True
        jobs = [first]
        for job in self._waiting:
            if job is first or job.done.done() or not job.fits(first):
                continue
            if rows + job.rows > self.batching.rows:
                return jobs, True
            jobs.append(job)
            rows += job.rows
        return jobs, rows == self.batching.rows

    def _run(self, jobs: Sequence[Job]) -> list[Outputs | BaseException]:
        """In the thread: all at once; if that fails, each alone, so that one cannot spoil another."""
        if len(jobs) > 1:
            try:
                flat = [joined(parts) for parts in zip(*(job.inputs for job in jobs), strict=True)]
                return list(split(self._interface.run(flat), [job.rows for job in jobs]))
            except Exception as error:
                self._metrics.split.inc()
                self._tell(f"a batch failed and its requests run alone: {error_text(error)}")
        return [self._alone(job) for job in jobs]

    def _tell(self, sentence: str) -> None:
        """Print it the first time; clients must not be able to fill a disk with it."""
        if sentence not in self._printed and len(self._printed) < 20:
            self._printed.add(sentence)
            print(sentence, file=sys.stderr)

    def _alone(self, job: Job) -> Outputs | BaseException:
        try:
            return self._interface.run(job.inputs)
        except Exception as error:
            return error

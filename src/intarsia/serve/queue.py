"""The queue of requests for the module, which joins them into batches.

One thread runs the module, since engines use all cores in a call. Each request is checked before it joins a
batch: two invalid requests, such as 2 rows and 3 rows of two inputs and the reverse, could make a valid
batch. If a batch fails, its requests run one by one: only the model can tell which one fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from intarsia.compare import disagreement
from intarsia.errors import IntarsiaError, error_text, first_line
from intarsia.graph.rows import mixing
from intarsia.serve.interface import Interface

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's variable for the folder of several workers


class Metrics:
    """The metrics of one server process; with several workers, of all of them."""

    requests: Counter
    split: Counter
    gone: Counter

    def __init__(self, in_flight: Callable[[], float], fallen_back: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        several = SHARED in os.environ
        own = CollectorRegistry() if several else self._registry
        self.requests = Counter("intarsia_requests_total", "answers by HTTP status", ["status"], registry=own)
        self.split = Counter(
            "intarsia_split_batches_total", "batches that failed, whose requests ran one by one", registry=own
        )
        self.gone = Counter(
            "intarsia_gone_clients_total", "clients that disconnected before their answer", registry=own
        )
        self._seconds = Histogram(
            "intarsia_request_seconds", "from the request to its answer", registry=own, buckets=_SECONDS
        )
        self._waited = Histogram("intarsia_queue_seconds", "in the queue", registry=own, buckets=_SECONDS)
        self._ran = Histogram("intarsia_call_seconds", "calls of the module", registry=own, buckets=_SECONDS)
        self._rows = Histogram("intarsia_batch_rows", "rows in a call", registry=own, buckets=_ROWS)
        in_flight_now = Gauge(
            "intarsia_in_flight", "requests in progress", registry=own, multiprocess_mode="livesum"
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
        """All metrics in Prometheus's text format."""
        for gauge, read in self._gauges:
            gauge.set(read())
        return generate_latest(self._registry)


Outputs = dict[str, Any]


@dataclass(eq=False)
class Job:
    """One request: its flat inputs, the future of its outputs, and the time of its arrival."""

    inputs: list[Any]
    done: asyncio.Future[Outputs]
    arrived: float = field(default_factory=time.monotonic)

    @property
    def rows(self) -> int:
        return next((int(v.shape[0]) for v in self.inputs if isinstance(v, torch.Tensor) and v.dim()), 1)

    def fits(self, other: Job) -> bool:
        """Whether the inputs differ only in rows. Each request has been checked before."""
        return all(
            a.shape[1:] == b.shape[1:]
            for a, b in zip(self.inputs, other.inputs, strict=True)
            if isinstance(a, torch.Tensor)
        )


class Queue:
    """Jobs in the order of arrival; a thread runs one batch at a time."""

    def __init__(self, interface: Interface, batching: Batching, wait_s: float, metrics: Metrics) -> None:
        self._interface = interface
        self.batching: Batching = batching
        self._wait_s = wait_s
        self._metrics = metrics
        self._waiting: deque[Job] = deque()
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "intarsia-model")
        self._worker: asyncio.Task[None] | None = None
        self._mean_s = 0.0  # mean seconds of a call, for Retry-After
        self.running_since: float | None = None
        self._printed: set[str] = set()  # messages about failed batches

    def start(self) -> None:
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self, limit_s: float) -> None:
        """Run the waiting jobs, then end the thread. A call beyond the limit is abandoned."""
        end = time.monotonic() + limit_s
        while (self._waiting or self.running_since is not None) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._thread.shutdown(wait=self.running_since is None, cancel_futures=True)

    def put(self, inputs: list[Any]) -> asyncio.Future[Outputs]:
        """The future of the outputs. If it is cancelled, the job does not run, unless it runs already."""
        job = Job(inputs, asyncio.get_running_loop().create_future())
        job.done.add_done_callback(lambda done: self._remove(job) if done.cancelled() else None)
        self._waiting.append(job)
        self._arrival.set()
        return job.done

    def _remove(self, job: Job) -> None:
        """Remove the job of a disconnected client, to free its memory."""
        with contextlib.suppress(ValueError):  # the job runs already
            self._waiting.remove(job)

    def wait_s(self) -> float:
        """The approximate seconds that a new request would wait."""
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
                results = await loop.run_in_executor(self._thread, self._run, jobs)
            except Exception as error:  # `_run` should not raise, but a client must not wait for ever
                results = [error] * len(jobs)
            seconds = time.monotonic() - self.running_since
            self._mean_s = seconds if not self._mean_s else 0.9 * self._mean_s + 0.1 * seconds
            self.running_since = None
            self._metrics.ran(sum(job.rows for job in jobs), seconds)
            for job, result in zip(jobs, results, strict=True):
                if job.done.done():  # the client has disconnected
                    continue
                if isinstance(result, BaseException):
                    job.done.set_exception(result)
                else:
                    job.done.set_result(result)

    async def _next(self) -> list[Job]:
        """The jobs of the next call. Waits until the call is full, or its oldest job has waited `wait_s`."""
        while True:
            self._arrival.clear()
            while self._waiting and self._waiting[0].done.done():
                self._waiting.popleft()
            if not self._waiting:
                await self._arrival.wait()
                continue
            jobs, full = self._batch()
            left = self._waiting[0].arrived + self._wait_s - time.monotonic()
            if full or left <= 0:
                break
            try:
                async with asyncio.timeout(left):
                    await self._arrival.wait()
            except TimeoutError:
                jobs, _ = self._batch()
                break
        chosen = set(map(id, jobs))
        self._waiting = deque(job for job in self._waiting if id(job) not in chosen)
        for job in jobs:
            self._metrics.waited(time.monotonic() - job.arrived)
        return jobs

    def _batch(self) -> tuple[list[Job], bool]:
        """The jobs that would share the next call, and whether the call is full."""
        first = next((job for job in self._waiting if not job.done.done()), None)
        if first is None:
            return [], True
        rows = first.rows
        if rows >= self.batching.rows:  # also if batching is off
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
        """In the thread: run all jobs in one call. If it fails, run each alone, so that only one may fail."""
        if len(jobs) > 1:
            try:
                flat = [joined(parts) for parts in zip(*(job.inputs for job in jobs), strict=True)]
                return list(split(self._interface.run(flat), [job.rows for job in jobs]))
            except Exception as error:
                self._metrics.split.inc()
                self._print_once(f"a batch failed and its requests run alone: {error_text(error)}")
        return [self._alone(job) for job in jobs]

    def _print_once(self, message: str) -> None:
        """Print a message the first time, and at most 20 messages, so that clients cannot fill a disk."""
        if message not in self._printed and len(self._printed) < 20:
            self._printed.add(message)
            print(message, file=sys.stderr)

    def _alone(self, job: Job) -> Outputs | BaseException:
        try:
            return self._interface.run(job.inputs)
        except Exception as error:
            return error


# Whether requests may share a call, and the number of rows in a call, or the reason why they may not.
#
# A trial cannot detect a small mean over the batch, or a branch that it does not take. So the graph must
# show that rows are independent. A trial then checks the engines.


@dataclass(frozen=True)
class Batching:
    """Requests share calls of up to `rows` rows. If `rows` is 0, they do not, and `why_not` is the reason."""

    rows: int
    why_not: str = ""

    def __str__(self) -> str:
        return f"up to {self.rows} rows per call" if self.rows else f"off: {self.why_not}"


def decide(interface: Interface, most: int) -> Batching:
    """The batching of up to `most` rows, if the module computes every row independently.

    The first axis of every input must be the same dynamic size, rows must be independent in the graph, and
    the outputs of a batch must be equal to those of its rows.
    """
    if most < 2:
        return Batching(0, "max_batch is 1")
    symbol = _batch_symbol(interface)
    if isinstance(symbol, str):
        return Batching(0, symbol)
    low, high = interface.symbols()[symbol]
    if high < 2:
        return Batching(0, f"the module was compiled for at most {high} rows")
    first = max(low, 2)
    calls = [(rows, _flat(interface, {**interface.usual(), symbol: rows})) for rows in (first, first + 1)]
    reason = mixing(interface.compiled.lowered.module, calls)
    if reason is not None:
        return Batching(0, reason)
    if 2 * first <= high:
        reason = _trial(interface, {**interface.usual(), symbol: 2 * first}, first)
    return Batching(min(most, high)) if reason is None else Batching(0, reason)


def _batch_symbol(interface: Interface) -> Any:
    """The symbol of the batch size, or the reason why there is none."""
    if not interface.inputs:
        return "the module takes no tensor"
    if interface.stateful:
        return "a call changes the module's buffers or its inputs"
    input_of: dict[Any, str] = {}
    for name, check in interface.inputs.items():
        if not check.shape or isinstance(check.shape[0], int) or check.shape[0].is_Integer:
            return f"the first axis of input {name} was compiled with a fixed size; compile it with a range"
        if not check.shape[0].is_Symbol or any(
            check.shape[0] in getattr(d, "free_symbols", ()) for d in check.shape[1:]
        ):
            return f"the first axis of input {name} is tied to another size"
        if check.strides is not None:
            return f"the module reads input {name} by its strides"
        input_of[check.shape[0]] = name
    if len(input_of) > 1:
        return f"the first axes of inputs {' and '.join(input_of.values())} are different sizes"
    return next(iter(input_of))


def _flat(interface: Interface, sizes: dict[Any, int]) -> list[Any]:
    """The inputs of the graph with these sizes: zeros, and the constants of the graph."""
    device = next(iter(interface.inputs.values())).device
    values = iter(interface.example(sizes).values())
    return [
        item.constant if item.is_constant else next(values).to(device)
        for item in interface.compiled.lowered.inputs
    ]


def _trial(interface: Interface, sizes: dict[Any, int], half: int) -> str | None:
    """How the outputs of a batch differ from those of its halves, or None."""
    example = interface.example(sizes, torch.Generator().manual_seed(0))
    try:
        together = interface.call(example)
        halves = [
            interface.call({name: value[at : at + half] for name, value in example.items()})
            for at in (0, half)
        ]
    except (IntarsiaError, RuntimeError, ValueError, IndexError) as error:
        return f"the module does not run on {2 * half} rows and on {half} ({first_line(error)})"
    expected = [joined([outputs[name] for outputs in halves]) for name in interface.outputs]
    difference = disagreement([together[name] for name in interface.outputs], expected)
    return None if difference is None else f"a batch differs from its rows: {difference}"


def joined(parts: Sequence[Any]) -> Any:
    """The concatenated rows of tensors; a value that is not a tensor is the same in all parts."""
    return torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def split(outputs: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The outputs of each request, from the outputs of a batch."""
    total, parts, at = sum(sizes), [], 0
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and (not value.dim() or value.shape[0] != total):
            raise RuntimeError(f"output {name} has the shape {tuple(value.shape)} for {total} rows")
    for size in sizes:
        parts.append({n: v[at : at + size] if isinstance(v, torch.Tensor) else v for n, v in outputs.items()})
        at += size
    return parts

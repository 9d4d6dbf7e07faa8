"""The server of a file: it loads the file, listens, and stops without losing a request.

A stopping server first answers with status 503 and `Connection: close` for a while. uvicorn would close idle
connections immediately, and lose requests that are on their way.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

import torch
import uvicorn

from intarsia.errors import InputError, IntarsiaError
from intarsia.serve import Options
from intarsia.serve.app import Service, app_of
from intarsia.serve.interface import Interface, load_interface
from intarsia.serve.queue import SHARED, decide


def service_of(path: str, options: Options) -> Service:
    """The service of a file, with its batching, after a first call of every engine."""
    interface = load_interface(path, options.imports)
    if interface.stateful and options.workers > 1:
        raise InputError("a call changes this module's buffers, which workers do not share; use one worker")
    batching = decide(interface, options.max_batch)
    if not interface.stateful:
        _warm(interface)
    return Service(interface, batching, options)


def _warm(interface: Interface) -> None:
    """Run once on zeros, since the first call of an engine may be slow."""
    try:
        interface.call(interface.example(interface.usual()))
    except Exception as error:  # the model may not take zeros; then the first request is slower
        print(f"not warmed up: {type(error).__name__}: {error}", file=sys.stderr)


def serve(path: str, options: Options, *, as_json: bool = False) -> None:
    """Serve a file until SIGTERM or SIGINT. Requests in progress are answered before it returns."""
    service = service_of(path, options)
    with _listening_socket(options) as listener:
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        description = {"file": path, "address": address, **service.describe()}
        text = json.dumps(description) if as_json else f"{path} at {address}\n{_summary(service)}"
        print(text, flush=True)
        if options.workers == 1:
            run(service, listener)
        else:
            del service
            _run_workers(path, options, listener)


def run(service: Service, listener: socket.socket) -> None:
    """Answer requests on a socket until the server is stopped."""
    options = service.options
    config = uvicorn.Config(
        app_of(service),
        ws="none",
        lifespan="on",
        log_level="error",  # warnings about invalid requests could fill a disk
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(options.stop_s)),
        limit_concurrency=options.connections,
    )
    Draining(config, service).run([listener])
    if service.queue.running_since is not None:
        print("a call of the module has not ended and is abandoned", file=sys.stderr, flush=True)
        os._exit(1)  # a normal exit would wait for its thread


class Draining(uvicorn.Server):
    """A server that answers with status 503 for a while after it is stopped, so that no request is lost.

    SIGTERM --> new requests get 503 and `Connection: close`; those in progress go on    (at most `linger_s`)
            --> idle connections are closed, others after their response                 (at most `stop_s`)
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service, self._close_at = service, 0.0
        self._idle: dict[Any, float] = {}  # connections without a complete request, and since when

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT and multiprocessing.parent_process() is not None:
            return  # a worker: the process that started it sends SIGTERM
        if self._service.stopping:  # the second signal stops the server immediately
            self.should_exit = self.force_exit = True
            return
        self._service.stopping = True
        self._close_at = time.monotonic() + self._service.options.linger_s

    async def on_tick(self, counter: int) -> bool:
        if self._service.stopping and (
            time.monotonic() >= self._close_at or not self.server_state.connections
        ):
            self.should_exit: bool = True
        if counter % 10 == 0:
            self._close_idle()
        return await super().on_tick(counter)

    def _close_idle(self) -> None:
        """Close connections that send no request, or its headers too slowly; uvicorn does not."""
        now, idle = time.monotonic(), {}
        for connection in self.server_state.connections:
            cycle = getattr(connection, "cycle", None)
            busy = cycle is not None and not cycle.response_complete
            if busy or getattr(connection, "timeout_keep_alive_task", None) is not None:
                continue
            idle[connection] = self._idle.get(connection, now)
            transport = getattr(connection, "transport", None)
            if now - idle[connection] > self._service.options.read_s and transport is not None:
                transport.close()
        self._idle = idle


def _listening_socket(options: Options) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise IntarsiaError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror}"
        ) from error


def _summary(service: Service) -> str:
    described = service.interface.describe()
    inputs = [f"  in   {name}: {d['dtype']} {d['shape']}" for name, d in described["inputs"].items()]
    outputs = f"  out  {', '.join(described['outputs'])}"
    return "\n".join([*inputs, outputs, f"  batching {service.queue.batching}"])


def _run_workers(path: str, options: Options, listener: socket.socket) -> None:
    """Run several processes on one socket. A signal stops all of them; if one ends, all end."""
    spawn = multiprocessing.get_context("spawn")
    stopping = False

    def stop(sig: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM)

    with _shared_metrics():
        workers = [
            spawn.Process(target=_work, args=(path, options, listener)) for _ in range(options.workers)
        ]
        # Ctrl-C reaches every process of a terminal. Workers inherit that they ignore it until they answer
        # requests, and then stop by the SIGTERM of this process alone.
        handlers = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, stop),
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        }
        try:
            for worker in workers:
                worker.start()
            signal.signal(signal.SIGINT, stop)
            listener.close()
            wait([worker.sentinel for worker in workers])
            died = not stopping
            if died:  # a second signal would stop the others immediately
                stop(signal.SIGTERM, None)
            for worker in workers:
                worker.join()
        finally:
            for sig, handler in handlers.items():
                signal.signal(sig, handler)
    if died:
        codes = ", ".join(str(worker.exitcode) for worker in workers)
        raise IntarsiaError(f"a worker ended unexpectedly, so the others were stopped (exit codes {codes})")


def _work(path: str, options: Options, listener: socket.socket) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // options.workers))
    run(service_of(path, options), listener)


@contextlib.contextmanager
def _shared_metrics() -> Iterator[None]:
    """The context of a folder in which prometheus_client collects the metrics of several processes."""
    if SHARED in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="intarsia-serve-") as folder:
        os.environ[SHARED] = folder
        try:
            yield
        finally:
            del os.environ[SHARED]

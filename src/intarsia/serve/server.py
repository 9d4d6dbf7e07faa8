"""A file to a running server: load it, say what it is, listen, and stop without losing a request.

A server that stops answers 503 with `Connection: close` for a while first. uvicorn closes idle connections at
once, and a request that is on its way over one would be lost.
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
from intarsia.serve.app import Options, Service, app_of
from intarsia.serve.batching import decide
from intarsia.serve.interface import Interface, load_interface
from intarsia.serve.queue import SHARED


def service_of(path: str, options: Options) -> Service:
    """Load a file and make it ready: batching decided, every engine run once."""
    interface = load_interface(path, options.imports)
    if interface.stateful and options.workers > 1:
        raise InputError(
            "a call changes this module's buffers, which workers do not share; serve it with one"
        )
    batching = decide(interface, options.max_batch)
    if not interface.stateful:
        _warm(interface)
    return Service(interface, batching, options)


def _warm(interface: Interface) -> None:
    """Run once on zeros, so that the first request does not pay for what engines do at a first call."""
    try:
        interface.call(interface.example(interface.usual()))
    except Exception as error:  # zeros may be no input of this model, and no request is worse off for it
        print(f"not warmed up: {type(error).__name__}: {error}", file=sys.stderr)


def serve(path: str, options: Options, *, as_json: bool = False) -> None:
    """Serve a file until SIGTERM or SIGINT; requests that were taken are answered before it returns."""
    service = service_of(path, options)
    with _door(options) as listener:
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        about = {"file": path, "address": address, **service.describe()}
        print(json.dumps(about) if as_json else f"{path} at {address}\n{_summary(service)}", flush=True)
        if options.workers == 1:
            run(service, listener)
        else:
            del service
            _run_workers(path, options, listener)


def run(service: Service, listener: socket.socket) -> None:
    """Answer on a socket until stopped."""
    options = service.options
    config = uvicorn.Config(
        app_of(service),
        ws="none",
        lifespan="on",
        log_level="error",  # a warning for every odd request would fill a disk
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(options.stop_s)),
        limit_concurrency=options.connections,
    )
    Draining(config, service).run([listener])
    if service.queue.running_since is not None:
        print("a call of the module has not ended and is abandoned", file=sys.stderr, flush=True)
        os._exit(1)  # its thread would keep the process from ending


class Draining(uvicorn.Server):
    """A server that, once stopped, answers with status 503 before it closes connections: no request is lost.

    SIGTERM --> new requests get 503 and `Connection: close`, those taken are answered   (at most `linger_s`)
            --> connections are closed, those with an answer to come when it has gone out (at most `stop_s`)
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service, self._hang_up_at = service, 0.0
        self._silent: dict[Any, float] = {}  # connections that have not sent a whole request, since when

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.stopping:  # told twice: now
            self.should_exit = self.force_exit = True
            return
        self._service.stopping = True
        self._hang_up_at = time.monotonic() + self._service.options.linger_s

    async def on_tick(self, counter: int) -> bool:
        if self._service.stopping and (
            time.monotonic() >= self._hang_up_at or not self.server_state.connections
        ):
            self.should_exit: bool = True
        if counter % 10 == 0:
            self._hang_up_on_silent()
        return await super().on_tick(counter)

    def _hang_up_on_silent(self) -> None:
        """Close connections that send nothing, or a request's head drop by drop; uvicorn would keep them."""
        now, silent = time.monotonic(), {}
        for connection in self.server_state.connections:
            cycle = getattr(connection, "cycle", None)
            busy = cycle is not None and not cycle.response_complete
            if busy or getattr(connection, "timeout_keep_alive_task", None) is not None:
                continue
            silent[connection] = self._silent.get(connection, now)
            transport = getattr(connection, "transport", None)
            if now - silent[connection] > self._service.options.read_s and transport is not None:
                transport.close()
        self._silent = silent


def _door(options: Options) -> socket.socket:
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
    """Processes that share one socket; a stop goes to all of them, and if one dies, all end."""
    spawn = multiprocessing.get_context("spawn")
    stopping = False

    def stop(sig: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM)

    with _shared_figures():
        workers = [
            spawn.Process(target=_work, args=(path, options, listener)) for _ in range(options.workers)
        ]
        handlers = {sig: signal.signal(sig, stop) for sig in (signal.SIGTERM, signal.SIGINT)}
        try:
            for worker in workers:
                worker.start()
            listener.close()
            wait([worker.sentinel for worker in workers])
            died = not stopping
            stop(signal.SIGTERM, None)
            for worker in workers:
                worker.join()
        finally:
            for sig, handler in handlers.items():
                signal.signal(sig, handler)
    if died:
        codes = ", ".join(str(worker.exitcode) for worker in workers)
        raise IntarsiaError(f"a worker ended by itself, so the others were stopped (exit codes {codes})")


def _work(path: str, options: Options, listener: socket.socket) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // options.workers))
    run(service_of(path, options), listener)


@contextlib.contextmanager
def _shared_figures() -> Iterator[None]:
    """A folder in which prometheus_client adds up the figures of several processes."""
    if SHARED in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="intarsia-serve-") as folder:
        os.environ[SHARED] = folder
        try:
            yield
        finally:
            del os.environ[SHARED]

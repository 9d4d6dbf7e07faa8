"""A real server on a real socket, in a thread of the test; requests go over loopback."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from intarsia.runtime import Compiled
from intarsia.serve.app import Options, Service, app_of
from intarsia.serve.interface import Interface
from intarsia.serve.queue import Batching, decide
from intarsia.serve.server import Draining


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Running:
    service: Service
    server: Draining
    port: int

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def post(self, body: Any, kind: str = "application/json", **headers: str) -> Answer:
        connection = self.connect()
        try:
            return post(connection, body, kind, **headers)
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        connection = self.connect()
        try:
            connection.request("GET", path)
            return _read(connection)
        finally:
            connection.close()

    def stop(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)


def post(
    connection: http.client.HTTPConnection, body: Any, kind: str = "application/json", **headers: str
) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", "/predict", data, {"Content-Type": kind, **headers})
    return _read(connection)


def _read(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


@contextmanager
def running(compiled: Compiled, batching: Batching | None = None, **options: Any) -> Iterator[Running]:
    interface, wishes = Interface.of(compiled), Options(**options)
    service = Service(interface, batching or decide(interface, wishes.max_batch), wishes)
    config = uvicorn.Config(
        app_of(service), ws="none", lifespan="on", log_level="error", limit_concurrency=wishes.connections
    )
    server = Draining(config, service)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as door:
        thread = threading.Thread(target=server.run, args=([door],))
        thread.start()
        try:
            made = Running(service, server, door.getsockname()[1])
            assert made.get("/health").status == 200
            yield made
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(30)
            assert not thread.is_alive()

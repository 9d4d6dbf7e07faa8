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

import torch
import uvicorn
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.runtime import Compiled
from intarsia.serve import Options
from intarsia.serve.app import Service, app_of
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


# Small models to serve, compiled for a batch of 1 to 16 rows.


class Scores(nn.Module):
    """A classifier over words; a word beyond the table is an IndexError, in PyTorch as on engines."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
        mean = (self.table(words) * weights.unsqueeze(-1)).sum(1)
        return {"scores": self.head(mean), "state": (mean.tanh(),), "nothing": None}


def scores(engines: Any = "onnxruntime") -> tuple[nn.Module, Compiled]:
    torch.manual_seed(0)
    model, rows = Scores().eval(), Dim("rows", min=1, max=16)
    example = (torch.randint(0, 20, (3, 5)), torch.rand(3, 5))
    return model, compiled(model, example, {"words": {0: rows}, "weights": {0: rows}}, engines=engines)


def compiled(model: nn.Module, example: tuple[Any, ...], shapes: Any, engines: Any = "pytorch") -> Compiled:
    made = intarsia.compile(model.eval(), example, dynamic_shapes=shapes, engines=engines)
    assert isinstance(made, Compiled), made.notes
    return made


class Slow(nn.Module):
    """A model that takes a while: `rows` matrices multiplied again and again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(40):
            y = (y @ x).tanh()
        return y

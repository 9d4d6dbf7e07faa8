"""Runs of a saved module: on files, or over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from intarsia.errors import InputError


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Options:
    """The options of `intarsia serve`, with the texts of its help."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = _option(8000, "Port; 0 for any free port.")
    max_batch: int = _option(32, "Rows that may share a call; 1 turns batching off.")
    wait_ms: float = _option(2.0, "Milliseconds that a request waits for others to share its call.")
    queue: int = _option(256, "Requests in progress; further ones get status 503.")
    max_body: int = _option(64 * 2**20, "Bytes of a request; larger ones get status 413.")
    max_held: int = _option(512 * 2**20, "Bytes of all requests in progress; further ones get status 503.")
    read_s: float = _option(30.0, "Seconds that a client may take to send a request.")
    answer_s: float = _option(60.0, "Seconds until a request without an answer gets status 504.")
    linger_s: float = _option(1.0, "Seconds that a stopping server answers with status 503.")
    stop_s: float = _option(30.0, "Seconds that a stopping server waits for requests in progress.")
    workers: int = _option(1, "Number of processes.")
    connections: int = _option(1000, "Open connections; further ones get status 503.")
    imports: tuple[str, ...] = ()  # modules that define types or operators of the file

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"port is {self.port}; it must be from 0 to 65535")
        for name in ("max_batch", "queue", "max_body", "max_held", "workers", "connections"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("wait_ms", "linger_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name)}; at least 0 is needed")
        for name in ("read_s", "answer_s", "stop_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name)}; more than 0 is needed")

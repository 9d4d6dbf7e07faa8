"""How a server is to behave."""

from __future__ import annotations

from dataclasses import dataclass

from intarsia.errors import InputError


@dataclass(frozen=True)
class Options:
    """What `intarsia serve` takes besides the file."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32  # rows; 1 switches batching off
    wait_ms: float = 2.0  # a request waits so long at most for others to share its call
    queue: int = 256  # requests taken and not answered; beyond, 503
    max_body: int = 64 * 2**20  # bytes of a request
    max_held: int = 512 * 2**20  # bytes of all requests taken and not answered; beyond, 503
    read_s: float = 30.0  # a client may take so long to send a request
    answer_s: float = 60.0  # a request that has no answer then gets 504
    linger_s: float = 1.0  # after SIGTERM, requests are refused in words for so long before the door is shut
    stop_s: float = 30.0  # after SIGTERM, requests that were taken may take so long
    workers: int = 1  # processes
    connections: int = 1000  # open at once; beyond, uvicorn's 503
    imports: tuple[str, ...] = ()  # modules that define types or operators of the file

    def __post_init__(self) -> None:
        for name in ("max_batch", "queue", "max_body", "max_held", "workers", "connections"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("wait_ms", "linger_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name)}; at least 0 is needed")
        for name in ("read_s", "answer_s", "stop_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name)}; more than 0 is needed")

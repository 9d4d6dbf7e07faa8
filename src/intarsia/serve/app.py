"""The HTTP side: a request to tensors, tensors to an answer, and a sentence for whatever is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from intarsia.errors import InputError, error_text, first_line
from intarsia.runtime import Compiled
from intarsia.serve.batching import Batching
from intarsia.serve.interface import Interface
from intarsia.serve.payload import JSON, SAFETENSORS, Unfit, decode, encode
from intarsia.serve.queue import Metrics, Outputs, Queue

_INLINE = 64 * 1024  # bytes that are decoded or encoded right here; more would hold up other requests
_KINDS = {JSON: JSON, SAFETENSORS: SAFETENSORS, "application/octet-stream": SAFETENSORS}


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


class Refused(Exception):
    """A request that gets no tensors: a status and a sentence."""

    def __init__(self, status: int, sentence: str, retry_s: float | None = None) -> None:
        super().__init__(sentence)
        self.status: int = status
        self.retry_s: float | None = retry_s


@dataclass
class _Hold:
    """The bytes that one request has here."""

    size: int = 0


class Service:
    """One module being served: who is inside, who may come in, and what is being answered."""

    def __init__(self, interface: Interface, batching: Batching, options: Options) -> None:
        self.interface: Interface = interface
        self.options: Options = options
        self.in_flight: int = 0
        self.stopping: bool = False
        count = len(interface.compiled.notes)
        self.metrics: Metrics = Metrics(lambda: self.in_flight, lambda: len(interface.compiled.notes) - count)
        self.queue: Queue = Queue(interface, batching, options.wait_ms / 1000, self.metrics)
        self._dtypes = {name: check.dtype for name, check in interface.inputs.items()}
        self._held = 0  # bytes of bodies, or of the tensors they became

    async def predict(self, request: Request) -> Response:
        """Inputs in, outputs out."""
        began = time.monotonic()
        try:
            response = await self._predict(request)
        except Refused as refused:
            headers = (
                {} if refused.retry_s is None else {"Retry-After": str(max(1, math.ceil(refused.retry_s)))}
            )
            response = JSONResponse({"error": str(refused)}, refused.status, headers)
        except ClientDisconnect:
            self.metrics.gone.inc()
            response = Response(status_code=499)  # nobody reads it
        if self.stopping:
            response.headers["Connection"] = "close"
        self.metrics.answered(response.status_code, time.monotonic() - began)
        return response

    async def _predict(self, request: Request) -> Response:
        content, wanted = _kinds(request)
        refusal = self._full()
        if refusal is not None:
            await _dropped(request, self.options.read_s)
            raise refusal
        self.in_flight += 1
        hold = _Hold()
        try:
            body = await self._body(request, hold)
            flat = await _aside(len(body), self._flat, body, content)
            del body
            outputs = await self._answer(request, self.queue.put(flat))
            return Response(await _aside(_size(outputs), _encoded, outputs, wanted), media_type=wanted)
        finally:
            self.in_flight -= 1
            self._held -= hold.size

    def _full(self) -> Refused | None:
        if self.stopping:
            return Refused(503, "the server is stopping; ask another", 1)
        if self.in_flight >= self.options.queue:
            return Refused(503, f"{self.in_flight} requests wait already; try again", self.queue.wait_s())
        return None

    async def _body(self, request: Request, hold: _Hold) -> bytes:
        """The request's body, within the limits on size and time."""
        most = self.options.max_body
        length = request.headers.get("content-length", "")
        too_large = Refused(413, f"the body has more than {most} bytes")
        if length.isdecimal() and int(length) > most:
            await _dropped(request, self.options.read_s)
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.options.read_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        chunks.append(chunk)
                        self._take(hold, len(chunk))
        except TimeoutError:
            if size > most:
                raise too_large from None
            raise Refused(408, f"the body did not come within {self.options.read_s:g} s") from None
        if size > most:
            raise too_large
        return b"".join(chunks)

    def _take(self, hold: _Hold, size: int) -> None:
        hold.size += size
        self._held += size
        if self._held > self.options.max_held:
            raise Refused(503, f"requests of {self._held} bytes wait already; try again", self.queue.wait_s())

    def _flat(self, body: bytes, kind: str) -> list[Any]:
        try:
            tensors = decode(body, kind, self._dtypes)
        except InputError as error:
            raise Refused(400, str(error)) from None
        try:
            return self.interface.prepared(tensors)
        except InputError as error:
            raise Refused(422, str(error)) from None

    async def _answer(self, request: Request, answer: asyncio.Future[Outputs]) -> Outputs:
        """The module's answer; nothing is computed for a client that has gone."""
        gone = asyncio.ensure_future(_left(request))
        either: set[asyncio.Future[Any]] = {answer, gone}
        try:
            await asyncio.wait(either, timeout=self.options.answer_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise ClientDisconnect
            raise Refused(504, f"there was no answer within {self.options.answer_s:g} s")
        except (InputError, IndexError, ValueError) as error:
            raise Refused(422, f"the model does not take these values: {first_line(error)}") from None
        except (Refused, ClientDisconnect):
            raise
        except Exception as error:
            raise Refused(500, f"the model failed: {error_text(error)}") from error
        finally:
            answer.cancel()
            gone.cancel()

    def health(self) -> tuple[int, str]:
        """A status and a word: whether requests are answered."""
        since = self.queue.running_since
        if self.stopping:
            return 503, "stopping"
        if since is not None and time.monotonic() - since > self.options.answer_s:
            return 503, "stuck"
        return 200, "ready"

    def describe(self) -> dict[str, Any]:
        """What the module takes and gives, and how it is served."""
        compiled: Compiled = self.interface.compiled
        return {
            **self.interface.describe(),
            "batching": str(self.queue.batching),
            "engines": list(compiled.plan.engines),
            "notes": list(compiled.notes),
        }


def app_of(service: Service) -> FastAPI:
    """The service as a web application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.queue.start()
        yield
        await service.queue.stop(service.options.stop_s)

    app = FastAPI(title="intarsia", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return await service.predict(request)

    @app.get("/")
    async def describe() -> JSONResponse:
        return JSONResponse(service.describe())

    @app.get("/health")
    async def health() -> JSONResponse:
        status, word = service.health()
        return JSONResponse({"status": word}, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def _kinds(request: Request) -> tuple[str, str]:
    """What the client sends, and what it wants back: the same, unless it says so."""
    content = _KINDS.get(request.headers.get("content-type", JSON).split(";")[0].strip().lower())
    if content is None:
        raise Refused(415, f"the body must be {JSON} or {SAFETENSORS}")
    accepted = [
        kind.split(";")[0].strip().lower() for kind in request.headers.get("accept", "*/*").split(",")
    ]
    for kind in accepted:
        if kind in _KINDS:
            return content, _KINDS[kind]
    if any(kind in ("*/*", "application/*", "") for kind in accepted):
        return content, content
    raise Refused(406, f"the answer is {JSON} or {SAFETENSORS}")


def _encoded(outputs: Outputs, kind: str) -> bytes:
    try:
        return encode(outputs, kind)
    except Unfit as error:
        raise Refused(406, str(error)) from None


async def _aside(size: int, work: Any, *args: Any) -> Any:
    """Do small work here, large work in a thread."""
    return work(*args) if size <= _INLINE else await asyncio.to_thread(work, *args)


def _size(outputs: Outputs) -> int:
    return sum(getattr(value, "nbytes", 0) for value in outputs.values())


async def _dropped(request: Request, seconds: float) -> None:
    """Read a body and forget it: a client that still sends gets no answer, but a reset connection."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for _ in request.stream():
                pass


async def _left(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

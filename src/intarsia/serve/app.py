"""The HTTP application: requests to tensors, outputs to responses, and a message for every error."""

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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from intarsia.errors import InputError, error_text, first_line
from intarsia.runtime import Compiled
from intarsia.serve import Options
from intarsia.serve.interface import JSON, SAFETENSORS, Interface, Unfit, decode, encode
from intarsia.serve.queue import Batching, Metrics, Outputs, Queue

_INLINE = 64 * 1024  # larger bodies are decoded and encoded in a thread, not to delay other requests
_KINDS = {JSON: JSON, SAFETENSORS: SAFETENSORS, "application/octet-stream": SAFETENSORS}


class Refused(Exception):
    """A request that gets a status and a message instead of outputs."""

    def __init__(self, status: int, sentence: str, retry_s: float | None = None) -> None:
        super().__init__(sentence)
        self.status: int = status
        self.retry_s: float | None = retry_s


@dataclass
class _RequestBytes:
    """The bytes of one request that are in memory."""

    size: int = 0


class Service:
    """The service of one module: the limits, the requests in progress, and their responses."""

    def __init__(self, interface: Interface, batching: Batching, options: Options) -> None:
        self.interface: Interface = interface
        self.options: Options = options
        self.in_flight: int = 0
        self.stopping: bool = False
        count = len(interface.compiled.notes)
        self.metrics: Metrics = Metrics(lambda: self.in_flight, lambda: len(interface.compiled.notes) - count)
        self.queue: Queue = Queue(interface, batching, options.wait_ms / 1000, self.metrics)
        self._dtypes = {name: check.dtype for name, check in interface.inputs.items()}
        self._held = 0  # bytes of all requests in progress

    async def predict(self, request: Request) -> Response:
        """The response to a request for a prediction."""
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
            response = Response(status_code=499)  # the client does not read it
        if self.stopping:
            response.headers["Connection"] = "close"
        self.metrics.answered(response.status_code, time.monotonic() - began)
        return response

    async def _predict(self, request: Request) -> Response:
        content, accepted = _kinds(request)
        refusal = self._refusal()
        if refusal is not None:
            await _discard_body(request, self.options.read_s)
            raise refusal
        self.in_flight += 1
        memory = _RequestBytes()
        try:
            body = await self._body(request, memory)
            flat = await _run(len(body), self._flat, body, content)
            del body
            outputs = await self._answer(request, self.queue.put(flat))
            return Response(await _run(_size(outputs), _encoded, outputs, accepted), media_type=accepted)
        finally:
            self.in_flight -= 1
            self._held -= memory.size

    def _refusal(self) -> Refused | None:
        if self.stopping:
            return Refused(503, "the server is stopping; try another server", 1)
        if self.in_flight >= self.options.queue:
            return Refused(503, f"{self.in_flight} requests wait already; try again", self.queue.wait_s())
        return None

    async def _body(self, request: Request, memory: _RequestBytes) -> bytes:
        """The request's body. Raises Refused if it is too large or too slow."""
        most = self.options.max_body
        length = request.headers.get("content-length", "")
        too_large = Refused(413, f"the body has more than {most} bytes")
        if length.isdecimal() and int(length) > most:
            await _discard_body(request, self.options.read_s)
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.options.read_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        chunks.append(chunk)
                        self._count(memory, len(chunk))
        except TimeoutError:
            if size > most:
                raise too_large from None
            raise Refused(408, f"the body did not arrive within {self.options.read_s:g} s") from None
        if size > most:
            raise too_large
        return b"".join(chunks)

    def _count(self, memory: _RequestBytes, size: int) -> None:
        memory.size += size
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
        """The module's outputs. If the client disconnects, the call is cancelled."""
        disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
        either: set[asyncio.Future[Any]] = {answer, disconnected}
        try:
            await asyncio.wait(either, timeout=self.options.answer_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if disconnected.done():
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
            disconnected.cancel()

    def health(self) -> tuple[int, str]:
        """The HTTP status and one word: `ready`, `stopping` or `stuck`."""
        since = self.queue.running_since
        if self.stopping:
            return 503, "stopping"
        if since is not None and time.monotonic() - since > self.options.answer_s:
            return 503, "stuck"
        return 200, "ready"

    def describe(self) -> dict[str, Any]:
        """The inputs and outputs of the module, and how it is served; plain values for JSON."""
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

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> JSONResponse:
        served = "POST /predict, GET /, GET /health and GET /metrics"
        sentence = f"there is no {request.method} {request.url.path}; there are {served}"
        return JSONResponse({"error": sentence}, error.status_code, error.headers)

    return app


def _kinds(request: Request) -> tuple[str, str]:
    """The content types of the request and of the response; by default, both are the same."""
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


async def _run(size: int, function: Any, *args: Any) -> Any:
    """The result of a function, which runs in a thread if it has much data."""
    return function(*args) if size <= _INLINE else await asyncio.to_thread(function, *args)


def _size(outputs: Outputs) -> int:
    return sum(getattr(value, "nbytes", 0) for value in outputs.values())


async def _discard_body(request: Request, seconds: float) -> None:
    """Read and discard a body. A response before the end of the body would reset the connection."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for _ in request.stream():
                pass


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

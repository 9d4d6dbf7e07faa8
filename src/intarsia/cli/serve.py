"""`intarsia serve`: a saved module over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from intarsia.errors import IntarsiaError


def serve(
    file: Annotated[Path, typer.Argument(help="what intarsia.save wrote")],
    host: Annotated[str, typer.Option(help="0.0.0.0 for every interface")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free", min=0, max=65535)] = 8000,
    max_batch: Annotated[int, typer.Option(help="rows that may share a call; 1 for no batching")] = 32,
    wait_ms: Annotated[
        float, typer.Option(help="a request waits so long for others to share its call")
    ] = 2.0,
    queue: Annotated[int, typer.Option(help="requests taken and not answered; beyond, 503")] = 256,
    max_body: Annotated[int, typer.Option(help="bytes of a request; beyond, 413")] = 64 * 2**20,
    max_held: Annotated[int, typer.Option(help="bytes of all requests not answered; beyond, 503")] = 512
    * 2**20,
    read_s: Annotated[float, typer.Option(help="how long a client may take to send a request")] = 30.0,
    answer_s: Annotated[float, typer.Option(help="a request without an answer then gets 504")] = 60.0,
    linger_s: Annotated[float, typer.Option(help="how long a stopping server refuses in words")] = 1.0,
    stop_s: Annotated[float, typer.Option(help="how long it waits for what it has taken")] = 30.0,
    workers: Annotated[int, typer.Option(help="processes")] = 1,
    connections: Annotated[int, typer.Option(help="open at once; beyond, 503")] = 1000,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="a module that defines types or operators in it"),
    ] = None,
) -> None:
    """Serve a saved module: POST /predict, GET /, /health and /metrics."""
    try:
        from intarsia.serve.options import Options
        from intarsia.serve.server import serve as serve_file
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("intarsia"):
            raise
        raise IntarsiaError(f"serving needs {error.name}: pip install 'intarsia[serve]'") from error

    serve_file(
        str(file),
        Options(
            host=host,
            port=port,
            max_batch=max_batch,
            wait_ms=wait_ms,
            queue=queue,
            max_body=max_body,
            max_held=max_held,
            read_s=read_s,
            answer_s=answer_s,
            linger_s=linger_s,
            stop_s=stop_s,
            workers=workers,
            connections=connections,
            imports=tuple(imports or ()),
        ),
    )

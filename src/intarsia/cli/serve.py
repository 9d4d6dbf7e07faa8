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
    answer_s: Annotated[float, typer.Option(help="a request without an answer then gets 504")] = 60.0,
    linger_s: Annotated[float, typer.Option(help="how long a stopping server refuses in words")] = 1.0,
    stop_s: Annotated[float, typer.Option(help="how long it waits for what it has taken")] = 30.0,
    workers: Annotated[int, typer.Option(help="processes")] = 1,
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
            answer_s=answer_s,
            linger_s=linger_s,
            stop_s=stop_s,
            workers=workers,
        ),
    )

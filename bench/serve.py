"""A server under load over loopback: batching against none, and a stop in the middle of it.

    python bench/serve.py [--clients 32] [--seconds 5] [--rounds 3]

Each server is a process of its own; clients ask over kept-alive connections, one request of one row at a
time, as safetensors. Rounds with and without batching take turns. At the end the server is told to stop under
load, and every request must be answered or refused in words.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.engines import OnnxRuntime

WIDTH, DEPTH = 1024, 8


def saved(path: Path) -> None:
    """Layers whose weights are read once a call, however many rows it has."""
    layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    rows = Dim("rows", min=1, max=32)
    model, x = nn.Sequential(*layers).eval(), torch.randn(4, WIDTH)
    engine = OnnxRuntime(spinning=False)  # the server's own threads want the cores
    fast = intarsia.compile(model, (x,), dynamic_shapes={"input": {0: rows}}, engines=[engine])
    intarsia.save(fast, path)


def started(path: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    """A server, once it answers."""
    command = [sys.executable, "-m", "intarsia.serve", str(path), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r":(\d+)$", process.stdout.readline().strip())
    assert found is not None, "the server did not start"
    return process, int(found[1])


def request() -> bytes:
    """One row, as a whole HTTP request."""
    header = b'{"input":{"dtype":"F32","shape":[1,%d],"data_offsets":[0,%d]}}' % (WIDTH, 4 * WIDTH)
    body = struct.pack("<Q", len(header)) + header + torch.randn(1, WIDTH).numpy().tobytes()
    lines = ("POST /predict HTTP/1.1", "Host: x", "Content-Type: application/x-safetensors")
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Load:
    """Clients that ask one request after another; how long each answer took, and what was answered."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.seen: Counter[str] = Counter()

    async def run(self, port: int, clients: int, until: float) -> None:
        await asyncio.gather(*(self._client(port, until) for _ in range(clients)))

    async def _client(self, port: int, until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = request()
        try:
            while time.monotonic() < until:
                began = time.monotonic()
                writer.write(sent)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                self.seconds.append(time.monotonic() - began)
                self.seen[head[9:12].decode()] += 1
                if b"connection: close" in head:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            self.seen["lost"] += 1
        finally:
            writer.close()


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(60)


async def stopped_under_load(process: subprocess.Popen[str], port: int, clients: int) -> Counter[str]:
    load = Load()
    asking = asyncio.ensure_future(load.run(port, clients, time.monotonic() + 60))
    await asyncio.sleep(1)
    process.send_signal(signal.SIGTERM)
    await asking
    return load.seen


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("clients", 32), ("seconds", 5), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    wish = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.intarsia")
        saved(path)
        servers = {"alone": started(path, "--max-batch", "1"), "batched": started(path)}
        rates: dict[str, list[float]] = {name: [] for name in servers}
        times: dict[str, list[float]] = {name: [] for name in servers}
        seen: Counter[str] = Counter()
        for turn in range(wish.rounds + 1):  # the first round warms up
            for name, (_, port) in servers.items():
                load = Load()
                asyncio.run(load.run(port, wish.clients, time.monotonic() + wish.seconds))
                if turn:
                    rates[name].append(len(load.seconds) / wish.seconds)
                    times[name] += load.seconds
                    seen += load.seen
        table = Table(title=f"{wish.clients} clients, {wish.rounds} rounds of {wish.seconds} s")
        for column in ("", "requests a second", "p50 ms", "p99 ms"):
            table.add_column(column, justify="left" if not column else "right")
        for name in servers:
            cuts = statistics.quantiles(times[name], n=100)
            row = (statistics.median(rates[name]), cuts[49] * 1e3, cuts[98] * 1e3)
            table.add_row(name, *(f"{figure:.1f}" for figure in row))
        console.print(table)
        ratio = statistics.median(rates["batched"]) / statistics.median(rates["alone"])
        console.print(f"throughput with batching over without: {ratio:.2f}; answers: {dict(seen)}")
        process, port = servers["batched"]
        answers = asyncio.run(stopped_under_load(process, port, wish.clients))
        codes = (process.wait(60), stop(servers["alone"][0]))
        console.print(f"told to stop under load: {dict(answers)}, lost {answers['lost']}; exit codes {codes}")


if __name__ == "__main__":
    main()

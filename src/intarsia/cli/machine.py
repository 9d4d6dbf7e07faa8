"""`intarsia engines | env | cache`: commands about this machine, not about a model."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import typer

from intarsia.cli.arguments import AsJson, print_json

cache: typer.Typer = typer.Typer(
    help="List or delete the measurements and builds that are stored on this machine.", no_args_is_help=True
)


def engines(json: AsJson = False) -> None:
    """List the engines, and what to install for those that this machine lacks."""
    from intarsia.engines import known_engines

    reasons = {name: kind().unavailable() for name, kind in known_engines().items()}
    if json:
        print_json({name: {"usable": why is None, "reason": why} for name, why in reasons.items()})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("engine", "usable")
    for name, why in reasons.items():
        table.add_row(name, Text(why or "yes"))  # not as markup: it may contain `[mnn]`
    Console().print(table)


def env(json: AsJson = False) -> None:
    """Print versions, processor, engines and settings for a bug report."""
    import torch

    import intarsia
    from intarsia.cache.machine import package_version, processor_name
    from intarsia.cache.store import cache_directory
    from intarsia.engines import known_engines

    packages = ("numpy", "onnx", "onnx_ir", "onnxruntime", "openvino", "safetensors", "transformers")
    usable = {name: kind().unavailable() for name, kind in known_engines().items()}
    facts: dict[str, Any] = {
        "intarsia": intarsia.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: package_version(name) for name in packages},
        "system": platform.platform(),
        "processor": processor_name() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "engines": [name for name, why in usable.items() if why is None],
        "cache": str(cache_directory()),
        "settings": {key: value for key, value in os.environ.items() if key.startswith("INTARSIA_")},
    }
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        typer.echo(f"{name:12} {shown if shown not in (None, {}, '?') else '-'}")


@cache.command()
def where(json: AsJson = False) -> None:
    """Print the folder. The variable INTARSIA_CACHE changes it."""
    from intarsia.cache.store import cache_directory

    print_json(str(cache_directory())) if json else typer.echo(str(cache_directory()))


@cache.command()
def ls(json: AsJson = False) -> None:
    """List the files, the most recently used first."""
    files = sorted(_files(), key=lambda item: -item[2])
    if json:
        print_json([{"file": name, "bytes": size, "used": used} for name, size, used in files])
        return
    for name, size, used in files:
        typer.echo(f"{size / 2**20:10.1f} MiB  {(time.time() - used) / 3600:8.1f} h ago  {name}")
    typer.echo(f"{sum(size for _, size, _ in files) / 2**20:10.1f} MiB in {len(files)} files")


@cache.command()
def clear(json: AsJson = False) -> None:
    """Delete all files. Later compiles measure and build again."""
    from intarsia.cache.store import cache_directory

    files = _files()
    for name, _, _ in files:
        (cache_directory() / name).unlink(missing_ok=True)
    size = sum(size for _, size, _ in files)
    if json:
        print_json({"files": len(files), "bytes": size})
    else:
        typer.echo(f"deleted {len(files)} files, {size / 2**20:.1f} MiB")


def _files() -> list[tuple[str, int, float]]:
    """The files of the cache: path in its folder, bytes, and time of the last use.

    INTARSIA_CACHE may name a folder with other files in it, so a JSON file counts only if it has a lock file.
    """
    from intarsia.cache.store import cache_directory

    root = cache_directory()
    locks = list(root.glob("*.json.lock"))
    paths = [*(lock.with_suffix("") for lock in locks), *locks, *(root / "built").glob("*")]
    stats = [(str(path.relative_to(root)), path.stat()) for path in paths if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime) for name, stat in stats]

"""The command line, `intarsia COMMAND`. Commands import modules only when they run, so `--help` is fast.

Exit codes: 0 for success; 1 if `check` or `diff` finds a difference; 2 for a mistake in the call, or a model
or file that cannot be used; 3 for an unexpected error.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import sys
import time
from typing import Annotated, Any, NoReturn

import typer

from intarsia.cli import compiling, pipeline, running
from intarsia.cli.arguments import AsJson, print_json
from intarsia.errors import IntarsiaError, error_text

MISTAKE, UNEXPECTED, INTERRUPTED, CLOSED = 2, 3, 130, 141
_UsageError: Any = typer.BadParameter.__base__  # click's class; newer versions of typer vendor click

app: typer.Typer = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(compiling.explain)
app.command("compile")(compiling.compile_)
app.command()(compiling.export)
app.command()(compiling.bench)
app.command()(compiling.check)
app.command()(compiling.diff)
app.command()(pipeline.split)
# The arguments after the script belong to the script.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(running.tune)
app.command()(running.run)
app.command()(running.serve)
app.add_typer(pipeline.app, name="pipeline")


cache: typer.Typer = typer.Typer(
    help="List or delete the measurements and builds that are stored on this machine.", no_args_is_help=True
)


def _print_version(is_set: bool) -> None:
    if is_set:
        import intarsia

        typer.echo(intarsia.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log each stage and its time.")] = False,
) -> None:
    """Cut a PyTorch model into pieces, and run each on the engine that runs it fastest.

    MODEL is your function (FILE.py:FUNCTION), a file, a folder or a name: see `intarsia compile --help`.
    """
    if verbose:
        logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)7.0f ms  %(message)s")
        logging.getLogger("intarsia").setLevel(logging.INFO)


# `intarsia engines | env | cache`: commands about this machine, not about a model.


@app.command()
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


@app.command()
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


app.add_typer(cache, name="cache")
app.command()(compiling.demo)


def main() -> None:
    """The entry point. An error is one sentence on stderr; `--debug` shows its traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 shows ? in place of ±
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    words = sys.argv[1:]
    own = words[: words.index("tune")] if "tune" in words else words  # the rest may be a script's arguments
    if "--debug" in own:  # also after the command
        app([word for word in own if word != "--debug"] + words[len(own) :])
        return
    try:
        code = app(words or ["--help"], standalone_mode=False)
        print(end="", flush=True)
    except (IntarsiaError, _UsageError) as error:
        if isinstance(error, IntarsiaError):
            _end(str(error), MISTAKE)
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            raise SystemExit(MISTAKE) from None
        _end(_usage(error), MISTAKE)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:  # `intarsia cache ls | head`
        # click and rich exit with code 1, which means here that `check` has found a difference.
        if not isinstance(error.__context__ or error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(CLOSED) from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            _end(f"{error.filename}: {error.strerror}", MISTAKE)
        _end(f"{error_text(error)} (--debug shows where)", UNEXPECTED)
    if code == INTERRUPTED:
        _end("interrupted", INTERRUPTED)
    raise SystemExit(code or 0)


def _usage(error: Any) -> str:
    """The message of a usage error, with the command whose help explains the options."""
    sentence = error.format_message()
    if not sentence.endswith((".", "?")):
        sentence += "."
    return sentence if error.ctx is None else f"{sentence} See `{error.ctx.command_path} --help`."


def _end(sentence: str, code: int) -> NoReturn:
    typer.secho(sentence, fg=None if os.environ.get("NO_COLOR") else "red", err=True)
    raise SystemExit(code) from None

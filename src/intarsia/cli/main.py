"""The command line, `intarsia COMMAND`. Commands import modules only when they run, so `--help` is fast.

Exit codes: 0 for success; 1 if `check` or `diff` finds a difference; 2 for a mistake in the call, or a model
or file that cannot be used; 3 for an unexpected error.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from intarsia.cli import checking, compiling, machine, pipeline, running
from intarsia.errors import IntarsiaError, error_text

MISTAKE, UNEXPECTED, INTERRUPTED, CLOSED = 2, 3, 130, 141
_UsageError: Any = typer.BadParameter.__base__  # click's class; newer versions of typer vendor click

app: typer.Typer = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(compiling.explain)
app.command("compile")(compiling.compile_)
app.command()(compiling.export)
app.command()(compiling.bench)
app.command()(checking.check)
app.command()(checking.diff)
app.command()(pipeline.split)
# The arguments after the script belong to the script.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(running.tune)
app.command()(running.run)
app.command()(running.serve)
app.add_typer(pipeline.app, name="pipeline")
app.command()(machine.engines)
app.command()(machine.env)
app.add_typer(machine.cache, name="cache")
app.command()(compiling.demo)


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

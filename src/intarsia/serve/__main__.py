"""`python -m intarsia.serve FILE`: the server without the other commands, for containers."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from intarsia.errors import IntarsiaError
from intarsia.serve import Options


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m intarsia.serve", description=__doc__)
    parser.add_argument("file", help="a file of intarsia.save")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], help="a module to import first"
    )
    for option in fields(Options):
        if option.name == "imports":
            continue
        flag, default = f"--{option.name.replace('_', '-')}", option.default
        text = f"{option.metadata['help']} Default: %(default)s."
        parser.add_argument(flag, type=type(default), default=default, help=text)
    arguments = vars(parser.parse_args())
    try:
        from intarsia.serve.server import serve  # imports torch, which may be interrupted

        serve(arguments.pop("file"), Options(**{**arguments, "imports": tuple(arguments["imports"])}))
    except (IntarsiaError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

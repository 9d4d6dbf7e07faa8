"""Loads the archives of a folder in a process of its own and writes down what each answers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

import intarsia

ROOMS = ("convert", "rewrite", "partition", "build", "choose", "compiler", "report", "pipeline")


def main(folder: str, *imports: str) -> None:
    for name in imports:
        importlib.import_module(name)
    for archive in sorted(Path(folder).glob("*.intarsia")):
        fast = intarsia.load(archive)
        unwanted = {*(f"intarsia.{room}" for room in ROOMS), "transformers", "typer", "rich"}
        found = unwanted.intersection(sys.modules)
        if found and not imports:
            raise SystemExit(f"loading imported {found}")
        inputs = torch.load(archive.with_suffix(".calls"), weights_only=False)
        answers = [(fast(*args, **kwargs), args) for args, kwargs in inputs]
        told = {
            "answers": answers,
            "state": dict(fast.state_dict()),
            "plan": str(fast.plan),
            "notes": fast.notes,
        }
        torch.save(told, archive.with_suffix(".answers"))


if __name__ == "__main__":
    main(*sys.argv[1:])

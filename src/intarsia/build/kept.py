"""Compiled modules kept on disk: the next compile of the same model, in any process, builds no engine."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from intarsia.archive.load import Pieces, load_pieces
from intarsia.archive.save import save_sealed
from intarsia.build.fingerprint import Unknowable, digest_of, of_lowered, of_process, of_values
from intarsia.cache.directory import cache_directory
from intarsia.cache.shelf import Shelf
from intarsia.convert import registry
from intarsia.engines import Engine
from intarsia.errors import IntarsiaError
from intarsia.lower import Lowered
from intarsia.rewrite import RewritePatternManager
from intarsia.runtime.compiled import Compiled


@dataclass(frozen=True)
class Kept:
    """What an earlier compile made of the same graph, and what was said of it besides."""

    pieces: Pieces
    extra: Mapping[str, Any]


class Keeper:
    """The place on disk of one compile: `find` what an earlier one left, `keep` what this one made.

    A key is made of all that the outcome depends on: the lowered graph with its weights, the examples and
    what the model answers to them, engines and options, versions and machine. What cannot be told in text,
    such as a converter or a strategy of the user's own, makes a compile that is not kept.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._shelf = Shelf(cache_directory() / "built")

    @staticmethod
    def of(lowered: Lowered, answers: Any, engines: Sequence[Engine], wishes: Sequence[Any]) -> Keeper:
        """The keeper of a compile; `answers` are examples with what the model makes of them."""
        if Shelf(cache_directory() / "built").limit <= 0 or _has_own_parts():
            return Keeper(None)
        try:
            asked = [_telling(wish) for wish in wishes]
            using = [_engine_text(engine) for engine in engines]
            lines = [*of_process(), *_converters(), *of_lowered(lowered), *of_values(answers), *using, *asked]
        except (Unknowable, RuntimeError):  # the latter of a tensor without plain memory
            return Keeper(None)
        return Keeper(digest_of(lines))

    def find(self, lowered: Lowered, state: Callable[[], Mapping[str, torch.Tensor]]) -> Kept | None:
        """What was kept, over the weights of this model; None where there is nothing, or nothing whole."""
        path = None if self._key is None else self._shelf.find(self._key)
        told = None if path is None else self._shelf.find(f"{self._key}.json")
        if path is None or told is None:
            return None
        try:
            extra = json.loads(told.read_bytes())
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what would be warned of is built again
                return Kept(load_pieces(path, lowered, state(), extra["seal"]), extra)
        except Exception:  # damaged, or thrown out by another process meanwhile: it is built again
            self._shelf.throw_out(f"{self._key}.json")
            self._shelf.throw_out(str(self._key))
            return None

    def keep(self, compiled: Compiled, extra: Mapping[str, Any]) -> None:
        """Keep a module; one that cannot be saved, or is too large, is not kept."""
        size = sum(tensor.nbytes for tensor in compiled.state_dict().values())
        if self._key is None or not self._shelf.has_room(size):
            return
        seals: list[str] = []

        def write(path: Path) -> None:
            seals.append(save_sealed(compiled, path))

        try:
            self._shelf.put(self._key, write)
        except IntarsiaError:
            return
        if seals:
            text = json.dumps({**extra, "seal": seals[0]})
            self._shelf.put(f"{self._key}.json", lambda path: _write_text(path, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _telling(value: Any) -> str:
    """The text of a wish; an object that is told by its address alone could be any."""
    if callable(value) and not isinstance(value, type):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '<')}"
        if not name.startswith("intarsia.") or "<" in name:
            raise Unknowable(name)
        return name
    text = repr(value)
    if " at 0x" in text or "<function" in text or "object at" in text:
        raise Unknowable(text)
    return text


def _engine_text(engine: Engine) -> str:
    """An engine with its options and its version."""
    kind = type(engine)
    return f"{kind.__module__}.{kind.__qualname__} {engine.version()} {_telling(engine.key())}"


def _has_own_parts() -> bool:
    """Whether converters or patterns are in use that this package does not ship."""
    if RewritePatternManager.instance().entries():
        return True
    return not all(one.shipped for target in registry.targets() for one in registry.converters(target))


def _converters() -> list[str]:
    """Those in use; some may be switched off."""
    return sorted(
        f"{target} {[c.name for c in registry.converters(target)]}" for target in registry.targets()
    )

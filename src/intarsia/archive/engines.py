"""Engines by name and options, and the programs that they have packed.

A file names engines, and those of this process are used. Free options are not stored: those of ONNX Runtime
and Inductor can name files to write and compilers to run. A thread loads packed programs while graphs are
read, since an engine's loading takes longest and releases Python's lock.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType

import torch

from intarsia.archive.codec import Json, from_json, to_json
from intarsia.archive.container import Reader
from intarsia.cache.machine import machine_key, processor_features
from intarsia.engines import Engine, NetworkEngine, Program, PyTorch, known_engines, resolve_engines
from intarsia.engines.base import WeightFile
from intarsia.errors import ArchiveError

_INSTEAD = "its segments run in PyTorch"
_FREE = "options"  # entries that an engine passes on unchecked; some name files, or programs to run


def engine_to_json(engine: Engine) -> Json:
    """An engine's options and its version; free options are listed by name only."""
    if known_engines().get(engine.name) is not type(engine):
        raise ArchiveError(
            f"engine {engine.name!r} cannot be found by its name in another"
            " process; register it by an entry point of the group intarsia.engines"
        )
    names: list[str] = (
        [f.name for f in dataclasses.fields(engine)] if dataclasses.is_dataclass(engine) else []
    )
    return {
        "fields": {name: to_json(getattr(engine, name)) for name in names if name != _FREE},
        "free": sorted(map(str, getattr(engine, _FREE, {}))),
        "version": engine.version(),
    }


def packed_for(engine: Engine) -> str:
    """The conditions under which a packed program is valid: engine, options, versions, machine."""
    return f"{engine.key()}, {engine.version()}, {machine_key()}, {processor_features()}"


def engines_from_json(
    described: Mapping[str, Json],
    asked: Sequence[Engine | str] | Engine | str | None,
    notes: list[str],
    native: bool = False,
) -> dict[str, Engine]:
    """The engines to build with, by name: the user's, or those in the file that are available here.

    With `native`, engines that run packages of machine code need not be able to build.
    """
    if asked is not None:
        by_name = {engine.name: engine for engine in resolve_engines(asked)[0]}
        notes += [
            f"{name}: not among the engines that were passed; {_INSTEAD}"
            for name in described
            if name not in by_name
        ]
        return by_name
    usable: dict[str, Engine] = {}
    for name, entry in described.items():
        if entry["free"]:
            raise ArchiveError(
                f"engine {name!r} was used with options={{{', '.join(entry['free'])}}}, which a file may"
                f" not set; pass"
                f" the engine with engines=[...]"
            )
        reason = "there is no such engine on this machine"
        if (kind := known_engines().get(name)) is not None:
            usable[name] = kind(**{str(key): from_json(value) for key, value in entry["fields"].items()})
            runs = native and getattr(kind, "runs_packages", False)
            reason = "" if runs else usable[name].unavailable() or ""
        if reason:
            usable.pop(name, None)
            notes.append(f"{name}: {reason}; {_INSTEAD}")
            warnings.warn(notes[-1], stacklevel=4)
    return {**usable, "pytorch": PyTorch()}


class Unpacker:
    """The packed programs of pieces. Its `with` block ends when its thread has ended."""

    def __init__(
        self, reader: Reader, engines: Mapping[str, Engine], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._reader, self._engines, self._tensors = reader, engines, tensors
        self._pool = ThreadPoolExecutor(1, "intarsia-unpack")
        self._futures: dict[str, Future[Program]] = {}  # by the name of the blob

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, pieces: Json) -> None:
        """Start loading the programs of these pieces."""
        for item in pieces:
            engine = self._engines.get(item["engine"])
            if isinstance(engine, NetworkEngine) and self._fits(item, engine):
                name = str(item["packed"]["blob"])
                if name not in self._futures:
                    self._futures[name] = self._pool.submit(copy_context().run, self._load, item, engine)

    def program(self, item: Json, engine: NetworkEngine) -> Program | None:
        """The packed program of a piece; None if there is none, or it is for another version or machine.

        EngineError if the engine refuses it.
        """
        if not self._fits(item, engine):
            return None
        future = self._futures.pop(str(item["packed"]["blob"]), None)
        return self._load(item, engine) if future is None else future.result()

    def _fits(self, item: Json, engine: NetworkEngine) -> bool:
        packed = item.get("packed")
        return packed is not None and self._reader.path is not None and packed["for"] == packed_for(engine)

    def _load(self, item: Json, engine: NetworkEngine) -> Program:
        packed, path = item["packed"], self._reader.path
        assert path is not None
        weights = {str(name): self._tensors[key] for name, key in item["weights"].items()}
        places = {name: self._place(tensor) for name, tensor in weights.items()}
        file = WeightFile(str(path), {name: place for name, place in places.items() if place is not None})
        # Constants that the engine itself reads from the file, so they are checked here.
        beside = f"{str(packed['blob']).removesuffix('.blob')}.constants"
        if beside in self._reader.manifest["members"]:
            self._reader.member(beside)
        program = engine.unpack(self._reader.member(packed["blob"]), packed["about"], file, weights)
        if not self._reader.is_still_there():  # engines read weights by the path of the file
            raise ArchiveError("it was replaced or removed during loading")
        return program

    def _place(self, tensor: torch.Tensor) -> int | None:
        """The position of a tensor in the file; None if it is elsewhere, or has another layout."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_complex():
            return None
        return self._reader.place(tensor.data_ptr(), tensor.nbytes)

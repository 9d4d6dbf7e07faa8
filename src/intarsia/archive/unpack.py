"""What engines have packed into a file, made into programs by a thread while the file's graphs are read.

Building took four fifths of loading. Both engines let go of Python's lock, and no garbage is collected
meanwhile: a collection among all that transformers imports takes 0.1 s, and reading the graphs 0.03 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from intarsia.archive.container import Reader
from intarsia.archive.engines import packed_for
from intarsia.archive.values import Json
from intarsia.engines import Engine, NetworkEngine, Program
from intarsia.engines.base import WeightFile
from intarsia.errors import ArchiveError


class Unpacker:
    """Programs of pieces, by what the manifest says of them; used in a `with`, which awaits its thread.

    An engine's own loading takes longer than all the rest, and needs none of it.
    """

    def __init__(
        self, reader: Reader, engines: Mapping[str, Engine], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._reader, self._engines, self._tensors = reader, engines, tensors
        self._pool = ThreadPoolExecutor(1, "intarsia-unpack")
        self._begun: dict[str, Future[Program]] = {}  # by the name of the blob

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, pieces: Json) -> None:
        """Let the thread make what these pieces will ask for."""
        for item in pieces:
            engine = self._engines.get(item["engine"])
            if isinstance(engine, NetworkEngine) and self._fits(item, engine):
                name = str(item["packed"]["blob"])
                if name not in self._begun:
                    self._begun[name] = self._pool.submit(self._made, item, engine)

    def program(self, item: Json, engine: NetworkEngine) -> Program | None:
        """The program of a piece; None where none is packed, or for another version or machine.

        EngineError where the engine refuses it.
        """
        if not self._fits(item, engine):
            return None
        begun = self._begun.pop(str(item["packed"]["blob"]), None)
        return self._made(item, engine) if begun is None else begun.result()

    def _fits(self, item: Json, engine: NetworkEngine) -> bool:
        packed = item.get("packed")
        return packed is not None and self._reader.path is not None and packed["for"] == packed_for(engine)

    def _made(self, item: Json, engine: NetworkEngine) -> Program:
        packed, path = item["packed"], self._reader.path
        assert path is not None
        weights = {str(name): self._tensors[key] for name, key in item["weights"].items()}
        places = {name: self._place(tensor) for name, tensor in weights.items()}
        file = WeightFile(str(path), {name: place for name, place in places.items() if place is not None})
        # What the engine has put beside the weights it reads from the file by itself; nobody else checks it.
        beside = f"{str(packed['blob']).removesuffix('.blob')}.constants"
        if beside in self._reader.manifest["members"]:
            self._reader.member(beside)
        program = engine.unpack(self._reader.member(packed["blob"]), packed["about"], file, weights)
        if not self._reader.is_still_there():  # engines find weights by the name of the file
            raise ArchiveError("it was replaced or removed while it was loaded")
        return program

    def _place(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor begins in the file; None for one that is somewhere else, or otherwise, in memory."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_complex():
            return None
        return self._reader.place(tensor.data_ptr(), tensor.nbytes)

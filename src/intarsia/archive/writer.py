"""The writer: compiled modules become a file of any number of programs with one table of tensors.

`save`, `tuning.save`, `generation.save` and the build cache use it, with formats of different names and with
additional entries in the manifest. Tensors that programs share, such as the weights in the programs for
prompts and tokens, are stored once.
"""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import fx, nn

from intarsia.archive.call import call_to_json
from intarsia.archive.codec import Json, to_json
from intarsia.archive.container import Writer
from intarsia.archive.engines import engine_to_json, packed_for
from intarsia.archive.graphs import captured_module, captured_to_json, graph_to_json
from intarsia.archive.tensors import WEIGHTS, TensorTable
from intarsia.cache.machine import package_version, processor_name
from intarsia.cache.store import write_atomically
from intarsia.engines import Program
from intarsia.engines.base import GraphEngine, GraphProgram, GrowingFile, NetworkEngine
from intarsia.errors import ArchiveError, EngineError, RefitError
from intarsia.graph.piece import Piece
from intarsia.graph.segment import PYTORCH
from intarsia.plain_tensors import plain_state
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.cuda_graphs import CudaGraphs
from intarsia.runtime.fallback import WithFallback
from intarsia.runtime.inlay import Inlay

if TYPE_CHECKING:
    from intarsia.network import Network

FORMAT, VERSION = "intarsia", 3
MODEL = "model"  # the name of the only program in a file


@dataclass(frozen=True)
class _Packing:
    """A piece whose engine may pack its network."""

    entry: dict[str, Json]  # of the piece, in the manifest
    engine: NetworkEngine
    network: Network
    keys: dict[str, str]  # of weights, by their names in the network


class BundleWriter:
    """Collects programs by `add`, then writes them by `write` or `to_bytes`."""

    def __init__(self, native: bool = False) -> None:
        self._native = native  # whether engines add packages of machine code
        self._tensors = TensorTable()
        self._members: dict[str, bytes] = {}
        self._packings: list[_Packing] = []
        self._engines: dict[str, Json] = {}  # of the program that is being added
        self._programs: dict[str, Json] = {}
        self._strategy = ""  # of the plan and of the plans of bodies

    def add(self, name: str, compiled: nn.Module) -> str:
        """Add a program; returns its name."""
        if not isinstance(compiled, Compiled):
            raise ArchiveError(f"a {type(compiled).__name__} cannot be saved: it is not a compiled module")
        if not compiled.stands_for_model:
            raise ArchiveError(
                "this model runs as it is, in its own Python code, which a file cannot contain"
            )
        # After a write to a weight, folded constants would be those of the old values.
        compiled.weights.check(thorough=True)
        self._strategy, self._engines = compiled.plan.strategy, {}
        packages = len(self._members_under("native/"))
        self._programs[name] = self._program(compiled)
        if self._native and len(self._members_under("native/")) == packages:
            raise ArchiveError("none of its segments runs on an engine that packages machine code")
        return name

    def leaves(self, values: Sequence[Any]) -> list[Json]:
        """Tensors and plain values, such as those of an example."""
        return [
            {"tensor": self._tensors.add(value, "example")}
            if isinstance(value, torch.Tensor)
            else {"value": to_json(value)}
            for value in values
        ]

    def write(
        self,
        path: str | os.PathLike[str],
        format: str = FORMAT,
        version: int = VERSION,
        about: Mapping[str, Json] | None = None,
    ) -> None:
        """Write the file, with `about` in its manifest. The file appears complete or not at all."""
        manifest = {"format": format, "version": version, **(about or {})}
        write_atomically(path, lambda file, draft: self._write(file, manifest, draft))

    def to_bytes(
        self, format: str = FORMAT, version: int = VERSION, about: Mapping[str, Json] | None = None
    ) -> bytes:
        """The bytes of the file. Packed programs are left out, since they read weights from a file."""
        file = io.BytesIO()
        self._write(file, {"format": format, "version": version, **(about or {})}, None)
        return file.getvalue()

    def _write(self, file: BinaryIO, about: Mapping[str, Json], path: str | None) -> None:
        with Writer(file) as writer:
            writer.add(WEIGHTS, self._tensors.chunks())
            for name, data in self._members.items():
                writer.add(name, [data])
            if path is not None:
                writer.flush()
                start = writer.places[WEIGHTS]
                places = {key: start + place for key, place in self._tensors.places().items()}
                for number, packing in enumerate(self._packings):
                    _pack(writer, packing, path, places, f"packed/{number}")
            writer.close(
                {
                    **about,
                    "made by": provenance(),
                    "programs": self._programs,
                    "tensors": self._tensors.description(),
                }
            )

    def _members_under(self, folder: str) -> list[str]:
        return [name for name in self._members if name.startswith(folder)]

    def _member(self, folder: str, suffix: str, data: bytes) -> str:
        name = f"{folder}{len(self._members_under(folder))}{suffix}"
        self._members[name] = data
        return name

    def _program(self, compiled: Compiled) -> Json:
        lowered, state = compiled.lowered, plain_state(compiled.state_dict())
        # Tensors that a call changes come first, then the model's weights, by the model's own names.
        buffers = {name: self._tensors.add(t, name, changing=True) for name, t in lowered.buffers.items()}
        weights = {name: self._tensors.add(tensor, name) for name, tensor in state.items()}
        run = compiled.run
        return {
            "engines": self._engines,
            "call": call_to_json(compiled, lambda m: graph_to_json(m, self._tensors, self._body)),
            "buffers": buffers,
            "state": weights,
            "inlay": self._inlay(compiled.inlay, lowered.module),
            "notes": list(compiled.compile_notes),
            "captured": self._captured(compiled),
            "cuda_graphs": run.results if isinstance(run, CudaGraphs) else None,
        }

    def _captured(self, compiled: Compiled) -> Json:
        """Store the data that a refit needs, or the reason why they cannot be stored."""
        program = compiled.lowered.program
        try:
            if program is not None:
                module = captured_module(program)
            elif compiled.captured is not None:
                module = compiled.captured()
            else:
                return {"reason": "the saved module did not have its captured program"}
            data = captured_to_json(module, self._tensors, self._body)
        except (ArchiveError, RefitError) as error:
            return {"reason": str(error)}
        return {"member": self._member("captured/", ".json", data)}

    def _inlay(self, inlay: Inlay, owner: fx.GraphModule) -> Json:
        steps = zip(inlay.pieces, inlay.steps, strict=True)
        return {
            "graph": graph_to_json(owner, self._tensors, self._body),
            "strategy": self._strategy,
            "pieces": [self._piece(piece, step.program) for piece, step in steps],
        }

    def _body(self, module: nn.Module) -> Json:
        """A body of control flow: compiled, in a piece; lowered, in the whole graph."""
        if isinstance(module, Inlay):
            owner = module.graph.owning_module
            if owner is None:
                raise ArchiveError("the body of a control-flow operator has no graph")
            return {"inlay": self._inlay(module, owner)}
        if isinstance(module, fx.GraphModule):
            return {"graph": graph_to_json(module, self._tensors, self._body)}
        raise ArchiveError(f"the graph refers to a {type(module).__name__}, which has no form in an archive")

    def _piece(self, piece: Piece, program: Program) -> Json:
        segment = piece.segment
        entry: dict[str, Json] = {
            "engine": segment.engine,
            "nodes": [node.name for node in segment.nodes],
            "recomputed": [node.name for node in segment.recomputed],
            "alone": segment.do_not_merge,
            "reasons": {node.name: dict(why) for node, why in segment.reasons.items()},
            "inputs": [node.name for node in piece.inputs],
            "outputs": [node.name for node in piece.outputs],
        }
        if isinstance(program, GraphProgram) and segment.engine == PYTORCH:
            return {**entry, "module": graph_to_json(program.module, self._tensors, self._body)}
        if not isinstance(program, WithFallback):
            raise ArchiveError(
                f"a segment on {segment.engine} runs a {type(program).__name__}, which cannot be saved"
            )
        origin = program.origin
        if segment.engine not in self._engines:
            self._engines[segment.engine] = engine_to_json(origin.engine)
        values = isinstance(origin.engine, GraphEngine)
        entry |= {
            "module": graph_to_json(origin.module, self._tensors, self._body, values=values),
            "makes": [
                None if make is None else [to_json(make[0]), None if make[1] is None else list(make[1])]
                for make in program.types
            ],
            "only_full": origin.only_full,
        }
        if self._native and isinstance(origin.engine, GraphEngine) and origin.engine.runs_packages:
            entry["native"] = self._package(origin.engine, origin.module)
        if origin.network is not None:
            from intarsia.archive.networks import network_to_onnx  # loading does not need it

            data, keys = network_to_onnx(origin.network, self._tensors)
            entry |= {"network": self._member("networks/", ".onnx", data), "weights": keys}
            if isinstance(origin.engine, NetworkEngine):
                self._packings.append(_Packing(entry, origin.engine, origin.network, keys))
        return entry

    def _package(self, engine: GraphEngine, module: fx.GraphModule) -> Json:
        try:
            package = engine.package(module)
        except EngineError as error:
            raise ArchiveError(f"a segment on {engine.name} has no package: {error}") from error
        return {"package": self._member("native/", ".pt2", package), "for": packed_for(engine)}


def _pack(writer: Writer, packing: _Packing, path: str, places: dict[str, int], member: str) -> None:
    """Add the packed program, if the engine packs programs."""

    def append(data: bytes) -> int:
        writer.add(f"{member}.constants", [data])
        writer.flush()
        return writer.places[f"{member}.constants"]

    positions = {name: places[key] for name, key in packing.keys.items() if key in places}
    try:
        packed = packing.engine.pack(packing.network, GrowingFile(path, positions, append))
    except EngineError:
        return  # the engine is built again when the file is loaded
    if packed is not None:
        writer.add(f"{member}.blob", [packed.blob])
        about = dict(packed.about)
        packing.entry["packed"] = {
            "blob": f"{member}.blob",
            "for": packed_for(packing.engine),
            "about": about,
        }


def provenance() -> dict[str, Json]:
    """The versions and the system that write a file."""
    return {
        "intarsia": package_version("intarsia"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
    }


def save_bytes(compiled: nn.Module) -> bytes:
    """The bytes of a compiled module's file."""
    bundle = BundleWriter()
    bundle.add(MODEL, compiled)
    return bundle.to_bytes()

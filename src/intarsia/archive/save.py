"""A compiled module to a file."""

from __future__ import annotations

import io
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import fx, nn

from intarsia.archive.captured import CAPTURED, captured_module, captured_to_json
from intarsia.archive.container import Writer, write_atomically
from intarsia.archive.engines import engine_to_json, packed_for
from intarsia.archive.graphs import graph_to_json
from intarsia.archive.input_checks import check_to_json, ranges_to_json
from intarsia.archive.results import results_to_json
from intarsia.archive.structure import signature_to_json, spec_to_json
from intarsia.archive.tensors import WEIGHTS, TensorTable
from intarsia.archive.values import Json, to_json
from intarsia.cache.machine import package_version, processor_name
from intarsia.engines import Program
from intarsia.engines.base import GraphEngine, GrowingFile, NetworkEngine
from intarsia.engines.graph_program import GraphProgram
from intarsia.errors import ArchiveError, EngineError, RefitError
from intarsia.graph.piece import Piece
from intarsia.graph.segment import PYTORCH
from intarsia.lower.lowered import Lowered
from intarsia.plain_tensors import plain_state
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.cuda_graphs import CudaGraphs
from intarsia.runtime.fallback import WithFallback
from intarsia.runtime.inlay import Inlay

if TYPE_CHECKING:
    from intarsia.network import Network

FORMAT, VERSION = "intarsia", 2


def save_sealed(compiled: nn.Module, path: str | os.PathLike[str], native: bool = False) -> str:
    """Write the file, with machine code of engines that make it if `native`; the digest that tells it."""
    manifest, saver = _prepared(compiled, native)
    seals: list[str] = []
    write_atomically(path, lambda file, beside: seals.append(_write(file, manifest, saver, beside)))
    return seals[0]


def save_bytes(compiled: nn.Module) -> bytes:
    """The file, in memory; engines will be built again, since theirs need a file to find weights in."""
    file = io.BytesIO()
    _write(file, *_prepared(compiled), None)
    return file.getvalue()


def _prepared(compiled: nn.Module, native: bool = False) -> tuple[dict[str, Json], _Saver]:
    if not isinstance(compiled, Compiled):
        raise ArchiveError(f"a {type(compiled).__name__} cannot be saved: it is not a compiled module")
    if not compiled.stands_for_model:
        raise ArchiveError("this model runs as it is, by its own Python code, which an archive cannot hold")
    compiled.weights.check(
        thorough=True
    )  # those written to since would lie beside what was folded from the old ones
    saver = _Saver(compiled.plan.strategy, native)
    manifest = saver.manifest(compiled)
    if native and not saver.packages:
        raise ArchiveError("none of its segments runs on an engine that packages machine code")
    return manifest, saver


def _write(file: BinaryIO, manifest: dict[str, Json], saver: _Saver, path: str | None) -> str:
    writer = Writer(file)
    writer.add(WEIGHTS, saver.tensors.chunks())
    for name, data in saver.networks.items():
        writer.add(name, [data])
    for name, data in saver.packages.items():
        writer.add(name, [data])
    if saver.captured is not None:
        writer.add(CAPTURED, [saver.captured])
    if path is not None:
        writer.flush()
        start = writer.places[WEIGHTS]
        places = {key: start + place for key, place in saver.tensors.places().items()}
        for number, packing in enumerate(saver.packings):
            _pack(writer, packing, path, places, f"packed/{number}")
    return writer.close(manifest)


@dataclass(frozen=True)
class _Packing:
    """A piece whose engine may have a form of its own for its network."""

    written: dict[str, Json]  # the piece, in the manifest
    engine: NetworkEngine
    network: Network
    keys: dict[str, str]  # of weights, by their names in the network


def _pack(writer: Writer, packing: _Packing, path: str, places: dict[str, int], member: str) -> None:
    """Add what the engine has compiled, if it can give that."""

    def append(data: bytes) -> int:
        writer.add(f"{member}.constants", [data])
        writer.flush()
        return writer.places[f"{member}.constants"]

    known = {name: places[key] for name, key in packing.keys.items() if key in places}
    try:
        packed = packing.engine.pack(packing.network, GrowingFile(path, known, append))
    except EngineError:
        return  # it is built again when the file is loaded, as any engine without a form of its own
    if packed is not None:
        writer.add(f"{member}.blob", [packed.blob])
        entry = {"blob": f"{member}.blob", "for": packed_for(packing.engine), "about": dict(packed.about)}
        packing.written["packed"] = entry


class _Saver:
    """Collects what a manifest refers to while it is written."""

    def __init__(self, strategy: str, native: bool) -> None:
        self._strategy = strategy  # of the plan, and of the plans of bodies
        self._native = native
        self.packages: dict[str, bytes] = {}
        self.tensors = TensorTable()
        self.networks: dict[str, bytes] = {}
        self.captured: bytes | None = None
        self.packings: list[_Packing] = []
        self.engines: dict[str, Json] = {}

    def manifest(self, compiled: Compiled) -> dict[str, Json]:
        lowered, state = compiled.lowered, plain_state(compiled.state_dict())
        # What a call changes comes first, and alone; then the model's weights, under the model's own names.
        buffers = {name: self.tensors.add(t, name, changing=True) for name, t in lowered.buffers.items()}
        weights = {name: self.tensors.add(tensor, name) for name, tensor in state.items()}
        run = compiled.run
        contents = {
            "call": _call_to_json(compiled, lowered),
            "results": results_to_json(lowered, lambda m: graph_to_json(m, self.tensors, self._body)),
            "buffers": buffers,
            "state": weights,
            "inlay": self._inlay(compiled.inlay, lowered.module),
            "notes": list(compiled.compile_notes),
            "captured": self._captured(compiled),
            "cuda_graphs": run.results if isinstance(run, CudaGraphs) else None,
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "made by": made_by(),
            "engines": self.engines,
            "contents": contents,
            "tensors": self.tensors.description(),
        }

    def _captured(self, compiled: Compiled) -> Json:
        """Keep what a refit needs; where that cannot be kept, the reason why."""
        program = compiled.lowered.program
        try:
            if program is not None:
                module = captured_module(program)
            elif compiled.captured is not None:
                module = compiled.captured()
            else:
                return {"reason": "the module that was saved had not kept the program it was made of"}
            self.captured = captured_to_json(module, self.tensors, self._body)
        except (ArchiveError, RefitError) as error:
            return {"reason": str(error)}
        return {"member": CAPTURED}

    def _inlay(self, inlay: Inlay, owner: fx.GraphModule) -> Json:
        steps = zip(inlay.pieces, inlay.steps, strict=True)
        return {
            "graph": graph_to_json(owner, self.tensors, self._body),
            "strategy": self._strategy,
            "pieces": [self._piece(piece, step.program) for piece, step in steps],
        }

    def _body(self, module: nn.Module) -> Json:
        """A body of control flow: compiled, in a piece; as it was lowered, in the whole graph."""
        if isinstance(module, Inlay):
            owner = module.graph.owning_module
            if owner is None:
                raise ArchiveError("the body of a control-flow operator has lost its graph")
            return {"inlay": self._inlay(module, owner)}
        if isinstance(module, fx.GraphModule):
            return {"graph": graph_to_json(module, self.tensors, self._body)}
        raise ArchiveError(f"the graph refers to a {type(module).__name__}, which has no form in an archive")

    def _piece(self, piece: Piece, program: Program) -> Json:
        segment = piece.segment
        written: dict[str, Json] = {
            "engine": segment.engine,
            "nodes": [node.name for node in segment.nodes],
            "recomputed": [node.name for node in segment.recomputed],
            "alone": segment.do_not_merge,
            "reasons": {node.name: dict(why) for node, why in segment.reasons.items()},
            "inputs": [node.name for node in piece.inputs],
            "outputs": [node.name for node in piece.outputs],
        }
        if isinstance(program, GraphProgram) and segment.engine == PYTORCH:
            return {**written, "module": graph_to_json(program.module, self.tensors, self._body)}
        if not isinstance(program, WithFallback) or program.origin is None:
            raise ArchiveError(
                f"a segment on {segment.engine} runs a {type(program).__name__}, which cannot be saved"
            )
        origin = program.origin
        if segment.engine not in self.engines:
            self.engines[segment.engine] = engine_to_json(origin.engine)
        values = isinstance(origin.engine, GraphEngine)
        written |= {
            "module": graph_to_json(origin.module, self.tensors, self._body, values=values),
            "makes": [
                None if made is None else [to_json(made[0]), None if made[1] is None else list(made[1])]
                for made in program.makes
            ],
            "only_full": origin.only_full,
        }
        if self._native and isinstance(origin.engine, GraphEngine) and origin.engine.runs_packages:
            written["native"] = self._package(origin.engine, origin.module)
        if origin.network is not None:
            from intarsia.archive.networks import network_to_onnx  # which loading may do without

            data, keys = network_to_onnx(origin.network, self.tensors)
            member = f"networks/{len(self.networks)}.onnx"
            self.networks[member] = data
            written |= {"network": member, "weights": keys}
            if isinstance(origin.engine, NetworkEngine):
                self.packings.append(_Packing(written, origin.engine, origin.network, keys))
        return written

    def _package(self, engine: GraphEngine, module: fx.GraphModule) -> Json:
        member = f"native/{len(self.packages)}.pt2"
        try:
            self.packages[member] = engine.package(module)
        except EngineError as error:
            raise ArchiveError(f"a segment on {engine.name} has no package: {error}") from error
        return {"package": member, "for": packed_for(engine)}


def made_by() -> dict[str, Json]:
    """Who writes a file, and where."""
    return {
        "intarsia": package_version("intarsia"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
    }


def _call_to_json(compiled: Compiled, lowered: Lowered) -> Json:
    inputs = [[i.name, i.index, i.buffer, to_json(i.constant), i.is_constant] for i in lowered.inputs]
    outputs = [
        [o.role.name, o.target, to_json(o.constant), o.is_constant, o.is_input, o.twin]
        for o in lowered.outputs
    ]
    return {
        "inputs": inputs,
        "outputs": outputs,
        "in_spec": spec_to_json(lowered.in_spec),
        "out_spec": spec_to_json(lowered.out_spec),
        "names": list(lowered.input_names),
        "ranges": ranges_to_json(lowered.range_constraints),
        "guards": list(lowered.guards),
        "checks": [check_to_json(check) for check in compiled.checks],
        "signature": signature_to_json(compiled.call_signature),
    }

"""The reader: a file becomes compiled modules. None of it is code; engines are built from its description."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from intarsia.archive.call import check_from_json, lowered_from_json
from intarsia.archive.codec import Devices, Json, from_json, same_device, signature_from_json
from intarsia.archive.container import Reader
from intarsia.archive.engines import Unpacker, engines_from_json, packed_for
from intarsia.archive.graphs import ReadGraph, captured_from_json, graph_from_json
from intarsia.archive.tensors import WEIGHTS, alike, read_tensors
from intarsia.archive.writer import FORMAT, MODEL, VERSION
from intarsia.engines import Engine, GraphEngine, NetworkEngine, Program, PyTorch
from intarsia.errors import ArchiveError, EngineError, IntarsiaError, RefitError, error_text, first_line
from intarsia.graph.piece import Piece
from intarsia.graph.plan import Plan
from intarsia.graph.segment import PYTORCH, Segment
from intarsia.lower.lowered import Lowered
from intarsia.plain_tensors import plain_state
from intarsia.runtime.compiled import Compiled, Source
from intarsia.runtime.cuda_graphs import CudaGraphs
from intarsia.runtime.fallback import Origin, ResultType, WithFallback
from intarsia.runtime.inlay import Assembly, Inlay

if TYPE_CHECKING:
    from intarsia.network import Network

Place = str | torch.device | Mapping[str, str]


@dataclass(frozen=True)
class LoadOptions:
    """The options of `load`."""

    engines: Sequence[Engine | str] | Engine | str | None = None
    map_location: Place | None = None
    packed: bool = True  # use what engines have packed, if version and machine are the same
    native: bool = False  # run the machine code in the file


class Bundle:
    """The programs of a file, by name, which share one table of tensors."""

    def __init__(self, reader: Reader, weights: memoryview, options: LoadOptions) -> None:
        self.reader, self.options, self.devices = reader, options, _devices(options.map_location)
        self.manifest: dict[str, Any] = reader.manifest
        self.tensors = read_tensors(weights, self.manifest["tensors"], self.devices)

    def program(self, name: str, module: nn.Module | None = None) -> Compiled:
        """The compiled module of that name, with the weights of `module` if one is passed."""
        loader = _Loader(self, name)
        if module is not None:
            loader.take(plain_state(module.state_dict()))
        with loader.unpacking(self.options.packed):
            return loader.compiled(module)

    def assembly(
        self, name: str, lowered: Lowered, state: Mapping[str, torch.Tensor]
    ) -> tuple[Assembly, list[str]]:
        """The pieces of a graph that is in memory, with its model's weights, and the notes of the compile.

        ArchiveError if the weights differ.
        """
        loader = _Loader(self, name)
        loader.take(state)
        with loader.unpacking():
            assembly = loader.assembly(loader.contents["inlay"], lowered.module)
        if loader.notes:
            raise ArchiveError(loader.notes[0])
        return assembly, [str(note) for note in loader.contents["notes"]]

    def leaves(self, written: Sequence[Json]) -> list[Any]:
        """The values that `BundleWriter.leaves` wrote; tensors are copies, since a call may write to them."""
        return [
            self.tensors[item["tensor"]].clone() if "tensor" in item else from_json(item["value"])
            for item in written
        ]


@contextmanager
def open_bundle(
    source: Reader | str | os.PathLike[str] | bytes,
    name: str = FORMAT,
    version: int = VERSION,
    options: LoadOptions = LoadOptions(),  # noqa: B008  # frozen
) -> Iterator[Bundle]:
    """A file of the format `name`. At the end, ArchiveError is raised if its weights are damaged."""
    reader = source if isinstance(source, Reader) else Reader(source)
    check_version(reader.manifest, name, version)
    with _undisturbed(), reader.checking(WEIGHTS) as weights:
        yield Bundle(reader, weights, options)


def load_bytes(data: bytes) -> Compiled:
    """The compiled module that `save_bytes` wrote."""
    options = LoadOptions(packed=False)
    with complaining("the archive in memory cannot be loaded"), open_bundle(data, options=options) as bundle:
        return bundle.program(MODEL)


@contextmanager
def complaining(complaint: str) -> Iterator[None]:
    """Turn any error of reading a file into an ArchiveError, which begins with the complaint."""
    try:
        yield
    except ArchiveError as error:
        raise ArchiveError(f"{complaint}: {error}") from error
    except (EngineError, OSError):
        raise  # these name their cause: an engine that the user passed, or a file that is missing
    except (IntarsiaError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ArchiveError(f"{complaint}: its contents are inconsistent ({error_text(error)})") from error
    except (RuntimeError, SyntaxError, MemoryError) as error:  # RecursionError is a RuntimeError
        raise ArchiveError(f"{complaint}: torch cannot make it ({error_text(error)})") from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """In the `with` block, no garbage is collected, since objects that are read stay in use.

    With transformers imported, a collection takes about 0.1 s; reading the graphs of a BERT takes 0.03 s.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_version(manifest: Mapping[str, Json], name: str, current: int) -> None:
    """ArchiveError if the file has another format, or another version of it."""
    if manifest.get("format") != name:
        raise ArchiveError(f"it is not a file of the format {name!r} of Intarsia's")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise ArchiveError(f"it has the version {version!r}")
    if version != current:
        writer = manifest.get("made by")
        by = writer.get("intarsia") if isinstance(writer, dict) else None
        advice = "" if version > current else "; compile the model again and save it"
        raise ArchiveError(
            f"it has version {version} of the format, made by intarsia {by}; this one reads version {current}"
            f"{advice}"
        )


def _devices(place: Place | None) -> Devices:
    if place is None:
        return same_device
    if isinstance(place, Mapping):
        table = {torch.device(old): _here(new) for old, new in place.items()}
        return lambda device: table.get(device, device)
    there = _here(place)
    return lambda device: there


def _here(place: str | torch.device) -> torch.device:
    device = torch.device(place)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArchiveError(f"map_location names {str(device)!r}, but there is no CUDA device")
    return device


class _Loader:
    """Builds the program of one name from its description in the manifest."""

    def __init__(self, bundle: Bundle, name: str) -> None:
        self._reader, self._devices, options = bundle.reader, bundle.devices, bundle.options
        self._tensors, self._native = dict(bundle.tensors), options.native
        self.contents: Json = bundle.manifest["programs"][name]
        self.notes: list[str] = []
        described = self.contents["engines"]
        self._engines = engines_from_json(described, options.engines, self.notes, options.native)
        self._bodies: dict[nn.Module, Assembly] = {}  # of control flow
        self._unpacker: Unpacker | None = None

    @contextmanager
    def unpacking(self, packed: bool = True) -> Iterator[None]:
        """In the `with` block, programs that engines have packed are used. Their loading begins at once."""
        if not packed:
            yield
            return
        with Unpacker(self._reader, self._engines, self._tensors) as self._unpacker:
            self._unpacker.begin(self.contents["inlay"]["pieces"])
            yield

    def take(self, state: Mapping[str, torch.Tensor]) -> None:
        """Use weights that are in memory, by the model's names."""
        taken = {}
        for name, key in self.contents["state"].items():
            stored, own = self._tensors[key], state[name].detach()
            parts = [(t.shape, t.dtype, t.stride(), t.device) for t in (stored, own)]
            if parts[0] != parts[1]:
                raise ArchiveError(f"{name} is another weight, or laid out otherwise, or on another device")
            taken[key] = own
        described = self._reader.manifest["tensors"]
        self._tensors |= taken | alike(self._tensors | taken, described) | taken

    def compiled(self, model: nn.Module | None) -> Compiled:
        contents = self.contents
        call, inlay = contents["call"], contents["inlay"]
        module = self._graph(inlay["graph"]).module
        buffers = {name: self._tensors[key] for name, key in contents["buffers"].items()}
        lowered = lowered_from_json(call, module, buffers, lambda graph: self._graph(graph).module)
        assembly = self.assembly(inlay, module)
        notes = [*contents["notes"], *(f"loaded: {note}" for note in self.notes)]
        state = {name: self._tensors[key] for name, key in contents["state"].items()}
        compiled = Compiled(
            lowered,
            assembly,
            Source(model, signature_from_json(call["signature"]), state),
            notes,
            checks=[check_from_json(check, self._devices) for check in call["checks"]],
        )
        captured = contents["captured"]
        if "member" in captured:
            self._reader.member(captured["member"])  # reports damage now, and not at a refit
        compiled.captured = partial(self._captured, captured)
        results = contents["cuda_graphs"]
        if results in ("fresh", "static") and all(
            self._engines[name].capturable for name in assembly.plan.engines
        ):
            compiled.run_by(CudaGraphs(compiled.inlay.results, module.graph, results))
        return compiled

    def _captured(self, entry: Json) -> fx.GraphModule:
        if "member" not in entry:
            raise RefitError(f"the file holds no program to refit: {entry['reason']}")
        with complaining("the captured program of the file cannot be read"):
            data = self._reader.member(entry["member"])
            return captured_from_json(data, self._tensors, self._body, self._devices)

    def _graph(self, entry: Json) -> ReadGraph:
        return graph_from_json(entry, self._tensors, self._body, self._devices)

    def _body(self, entry: Json) -> nn.Module:
        if "graph" in entry:
            return self._graph(entry["graph"]).module
        owner = self._graph(entry["inlay"]["graph"]).module
        assembly = self.assembly(entry["inlay"], owner)
        inlay = Inlay(owner.graph, assembly)
        self._bodies[inlay] = assembly
        return inlay

    def assembly(self, inlay: Json, owner: fx.GraphModule) -> Assembly:
        nodes = {node.name: node for node in owner.graph.nodes}
        pieces, programs = [], []
        body_plans: dict[str, Plan] = {}
        for item in inlay["pieces"]:
            name = item["engine"]
            if name != PYTORCH and name not in self.contents["engines"]:
                raise ArchiveError(f"a segment runs on {name!r}, which is not among its engines")
            graph = self._graph(item["module"])
            engine, program = self._program(item, graph)
            segment = Segment(
                engine.name,
                tuple(nodes[n] for n in item["nodes"]),
                bool(item["alone"]),
                {nodes[n]: {str(e): str(r) for e, r in why.items()} for n, why in item["reasons"].items()},
                tuple(nodes[n] for n in item["recomputed"]),
            )
            inputs, outputs = (tuple(nodes[n] for n in item[side]) for side in ("inputs", "outputs"))
            body_plans |= self._plans_of_bodies(graph)
            pieces.append(Piece(segment, owner, graph.graph, inputs, outputs))
            programs.append(program)
        segments = tuple(piece.segment for piece in pieces if piece.segment.nodes)
        return Assembly(Plan(segments, str(inlay["strategy"])), pieces, programs, body_plans)

    def _plans_of_bodies(self, read: ReadGraph) -> dict[str, Plan]:
        plans: dict[str, Plan] = {}
        for node in read.graph.nodes:
            for source in node.all_input_nodes:
                body = read.root.get(str(source.target)) if source.op == "get_attr" else None
                if isinstance(body, Inlay):
                    plans |= self._bodies[body].plans_under(f"{node.name}.{source.target}")
        return plans

    def _program(self, item: Json, graph: ReadGraph) -> tuple[Engine, Program]:
        """The program of a piece: on its engine, or in PyTorch if the engine is missing or fails."""
        engine, pytorch = self._engines.get(item["engine"]), PyTorch()
        if engine is None or isinstance(engine, PyTorch):
            return pytorch, pytorch.build(graph.module)
        try:
            return engine, self._on_engine(item, graph, engine)
        except EngineError as error:
            self.notes.append(f"a segment runs in PyTorch: {first_line(error)}")
            warnings.warn(self.notes[-1], stacklevel=6)
            return pytorch, pytorch.build(graph.module)

    def _on_engine(self, item: Json, graph: ReadGraph, engine: Engine) -> Program:
        types: list[ResultType | None] = [
            None if make is None else (from_json(make[0]), None if make[1] is None else torch.Size(make[1]))
            for make in item["makes"]
        ]
        only_full = bool(item["only_full"])
        if isinstance(engine, NetworkEngine):
            origin = Origin(engine, lambda: graph.module, partial(self._network, item), only_full)
            program = self._unpacked(item, engine)
            if program is None:
                assert origin.network is not None
                program = engine.build(origin.network)
            return WithFallback(program, origin, types)
        assert isinstance(engine, GraphEngine)
        program = self._from_package(item, graph, engine)
        if program is None:
            program = engine.build(graph.module)
        return WithFallback(program, Origin(engine, graph.module, None, only_full), types)

    def _from_package(self, item: Json, graph: ReadGraph, engine: GraphEngine) -> Program | None:
        """The program from machine code in the file, if the user trusts it and it fits this machine."""
        packed = item.get("native")
        if packed is None:
            return None
        if not self._native:
            self.notes.append(f"{engine.name} is compiled again: the machine code in the file is not trusted")
            return None
        if packed["for"] != packed_for(engine):
            self.notes.append(
                f"{engine.name} is compiled again: its machine code is for another version or machine"
            )
            return None
        return engine.load_package(bytes(self._reader.member(packed["package"])), graph.module)

    def _network(self, item: Json) -> Network:
        from intarsia.archive.networks import network_from_onnx  # takes long to import

        return network_from_onnx(self._reader.member(item["network"]), item["weights"], self._tensors)

    def _unpacked(self, item: Json, engine: NetworkEngine) -> Program | None:
        """The program that an engine has packed, if it is to be used."""
        if self._unpacker is None:
            return None
        try:
            return self._unpacker.program(item, engine)
        except EngineError as error:
            self.notes.append(f"a segment is built again: {first_line(error)}")
            return None

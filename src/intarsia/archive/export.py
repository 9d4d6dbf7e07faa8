"""Exporting a compiled module to files for the runtimes of its engines."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim

from intarsia.archive.writer import provenance
from intarsia.engines import NetworkEngine, known_engines
from intarsia.errors import ArchiveError, EngineError, first_line
from intarsia.graph.piece import Piece
from intarsia.lower.lowered import Role
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.fallback import WithFallback
from intarsia.runtime.inlay import Step

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Exported:
    """The result of an export: a plain file or a folder of pieces, and the settings to load it with."""

    path: Path
    is_folder: bool
    settings: Mapping[str, str]

    def __str__(self) -> str:
        kind = "a folder of pieces, in the order of its manifest.json" if self.is_folder else "a plain file"
        load = "".join(f"; load it with {name}={value}" for name, value in self.settings.items())
        return f"wrote {self.path}, {kind}{load}"


def export(compiled: nn.Module, path: str | os.PathLike[str]) -> Exported:
    """Write a compiled module for the runtimes of its engines, which load it without Intarsia.

    If the name ends in `.onnx` (ONNX Runtime), `.xml` (OpenVINO) or `.pt2` (`torch.export.load`), one plain
    file with all weights is written. For `.onnx` and `.xml`, one engine must hold the whole plan; `.pt2` is
    the captured model and works with any plan. Any other name becomes a folder. It has a file for each
    segment and a `manifest.json` with the order of the segments and the values that each one takes and
    returns.

    Guards are not part of the files. For values that an engine treats differently from PyTorch, a file gives
    the engine's answer.

    Example:
        >>> import intarsia, pathlib, tempfile, torch
        >>> model, x = nn.Linear(8, 8), torch.ones(2, 8)
        >>> fast = intarsia.compile(model, (x,), engines="onnxruntime", min_block_size=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     intarsia.export(fast, pathlib.Path(folder, "linear.onnx")).is_folder
        False
    """
    path = Path(path)
    if not isinstance(compiled, Compiled):
        raise ArchiveError(f"a {type(compiled).__name__} cannot be exported: it is not a compiled module")
    if not compiled.stands_for_model:
        raise ArchiveError("this model runs as it is, in its own Python code, which a file cannot contain")
    compiled.weights.check()
    if path.suffix == ".pt2":
        return _program(compiled, path)
    written = [output.target for output in compiled.lowered.outputs if output.role is not Role.USER]
    if written:
        raise ArchiveError(f"a call changes {written[0]}, which a plain file cannot do; use intarsia.save")
    if path.suffix in {getattr(kind, "file_suffix", "") for kind in known_engines().values()} - {""}:
        return _plain(compiled, path)
    return _folder(compiled, path)


def _program(compiled: Compiled, path: Path) -> Exported:
    program = compiled.lowered.program
    if program is None:
        raise ArchiveError("a loaded module has no program of torch.export; export its model instead")
    torch.export.save(program, path)
    return Exported(path, False, {})


def _plain(compiled: Compiled, path: Path) -> Exported:
    """Write one file, if one engine has the whole plan."""
    pieces, inlay = compiled.inlay.pieces, compiled.inlay
    if len(pieces) != 1:
        where = ", ".join(f"{len(piece.segment)} nodes on {piece.segment.engine}" for piece in pieces)
        raise ArchiveError(f"no engine holds the whole plan ({where}); give a folder instead of {path.name}")
    (piece,), (step,) = pieces, inlay.steps
    if step.writes != tuple(slot for slot, _ in inlay.returned):
        raise ArchiveError("a result is an input, a constant or a duplicate; export to a folder instead")
    engine = _engine(step)
    if engine is None or engine.file_suffix != path.suffix:
        kind = "that" if engine is None else f"a file {engine.file_suffix or 'of its own'}"
        raise ArchiveError(f"the plan runs on {piece.segment.engine}; {path.name} is not {kind}")
    return Exported(path, False, dict(_write(step, path)))


def _folder(compiled: Compiled, path: Path) -> Exported:
    """Write a folder. It appears complete or not at all."""
    if path.exists():
        raise ArchiveError(f"{path} exists already; give the name of a new folder")
    draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    settings: dict[str, str] = {}
    try:
        pieces = []
        for number, (piece, step) in enumerate(zip(compiled.inlay.pieces, compiled.inlay.steps, strict=True)):
            engine = _engine(step)
            name = f"{number}-{piece.segment.engine}{engine.file_suffix if engine else '.pt2'}"
            own = _write(step, draft / name) if engine else _piece_program(piece, draft / name)
            settings |= own
            pieces.append(
                {
                    "file": name,
                    "engine": piece.segment.engine,
                    "version": engine.version() if engine else f"torch {torch.__version__}",
                    "settings": dict(own),
                    "inputs": [node.name for node in piece.inputs],
                    "outputs": [node.name for node in piece.outputs],
                }
            )
        graph = compiled.lowered.module.graph
        manifest = {
            "format": "intarsia pieces",
            "version": 1,
            "made by": provenance(),
            "inputs": [_described(node) for node in graph.find_nodes(op="placeholder")],
            "pieces": pieces,
            "outputs": _returned(graph),
        }
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        draft.chmod(0o755)
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Exported(path, True, settings)


def _engine(step: Step) -> NetworkEngine | None:
    """The engine of a step, if it writes files; PyTorch writes the others."""
    engine = step.program.origin.engine if isinstance(step.program, WithFallback) else None
    return engine if isinstance(engine, NetworkEngine) and engine.file_suffix else None


def _write(step: Step, path: Path) -> Mapping[str, str]:
    assert isinstance(step.program, WithFallback)
    engine, network = step.program.origin.engine, step.program.origin.network
    assert isinstance(engine, NetworkEngine) and network is not None
    try:
        return engine.write(network, path)
    except EngineError as error:
        raise ArchiveError(f"a segment on {engine.name} has no file: {error}") from error


def _piece_program(piece: Piece, path: Path) -> Mapping[str, str]:
    """Write a segment that PyTorch runs as a program of torch.export."""
    examples, dims = zip(*map(_example, piece.inputs), strict=True) if piece.inputs else ((), ())
    shapes = None if all(not dim for dim in dims) else (list(dims),)
    try:
        program = torch.export.export(
            _Flat(piece.module), tuple(examples), dynamic_shapes=shapes, strict=False
        )
    except Exception as error:  # export does not always accept a program that it returned
        where = f"a segment on {piece.segment.engine} ({piece.segment.nodes[0].name} and others)"
        raise ArchiveError(f"{where} has no file: torch cannot export it: {first_line(error)}") from error
    torch.export.save(program, path)
    return {}


class _Flat(nn.Module):
    """A piece as a module with positional arguments."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def _example(node: fx.Node) -> tuple[Any, dict[int, Any]]:
    """An example of a value of the graph, and its sizes that vary."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value, {}
    shape = [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    varying = {axis: Dim.DYNAMIC for axis, size in enumerate(value.shape) if not isinstance(size, int)}
    return torch.zeros(shape, dtype=value.dtype, device=value.device), varying


def _described(node: fx.Node) -> dict[str, Any]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return {"name": node.name}
    shape = [size if isinstance(size, int) else str(size) for size in value.shape]
    return {"name": node.name, "dtype": str(value.dtype).removeprefix("torch."), "shape": shape}


def _returned(graph: fx.Graph) -> list[Any]:
    """The outputs of the graph: names of values, or constants."""
    returned: Any = graph.output_node().args[0]
    items = returned if isinstance(returned, list | tuple) else [returned]
    return [{"name": item.name} if isinstance(item, fx.Node) else {"constant": item} for item in items]

"""What runs a piece: the engines this package ships, and those other packages add."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from intarsia.engines.base import Engine as Engine
from intarsia.engines.base import GraphEngine as GraphEngine
from intarsia.engines.base import GuardedProgram as GuardedProgram
from intarsia.engines.base import NetworkEngine as NetworkEngine
from intarsia.engines.base import Program as Program
from intarsia.engines.cudnn import CuDNN as CuDNN
from intarsia.engines.inductor.engine import Inductor as Inductor
from intarsia.engines.onnxruntime.engine import OnnxRuntime as OnnxRuntime
from intarsia.engines.openvino.engine import OpenVINO as OpenVINO
from intarsia.engines.pytorch import PyTorch as PyTorch
from intarsia.errors import EngineError

ENTRY_POINTS = "intarsia.engines"
# Known by name, but not asked unless named: one takes long to build, one is for GPUs.
NOT_BY_DEFAULT = ("inductor", "cudnn")


def known_engines() -> dict[str, type[Engine]]:
    """Engines by name, in the order they are asked; other packages add theirs by an entry point."""
    found: dict[str, type[Engine]] = {engine.name: engine for engine in (OpenVINO, OnnxRuntime)}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        engine = entry.load()
        found.setdefault(engine.name, engine)
    found["inductor"] = Inductor
    found["cudnn"] = CuDNN
    found["pytorch"] = PyTorch
    return found


def default_engines(device: str = "cpu") -> list[Engine]:
    """The engines asked when none is named, for a model on this kind of device, in that order."""
    if device == "cpu":
        return [kind() for name, kind in known_engines().items() if name not in NOT_BY_DEFAULT]
    # A GPU's time goes into launching kernels and moving memory, which is what Inductor saves.
    return [engine for engine in (Inductor(), PyTorch()) if engine.runs_on(device)]


def resolve_engines(
    asked: Sequence[Engine | str] | Engine | str | None, device: str = "cpu"
) -> tuple[list[Engine], list[str]]:
    """The engines to use, PyTorch last, and a sentence for each that this machine lacks.

    An engine asked for by the user and unavailable is an error; of the default ones it is a note.
    """
    known = known_engines()
    if asked is None:
        engines = default_engines(device)
    else:
        listed = [asked] if isinstance(asked, Engine | str) else list(asked)
        engines = [_make(item, known) for item in listed]
    usable: list[Engine] = []
    notes: list[str] = []
    for engine in engines:
        reason = engine.unavailable()
        if reason is None:
            usable.append(engine)
        elif asked is None:
            notes.append(f"{engine.name}: {reason}")
        else:
            raise EngineError(f"engine {engine.name!r} cannot be used: {reason}")
    names = [engine.name for engine in usable]
    for name in names:
        if names.count(name) > 1:
            raise EngineError(f"engine {name!r} is given twice")
    usable = [engine for engine in usable if engine.name != "pytorch"]
    return [*usable, PyTorch()], notes


def _make(item: Engine | str, known: dict[str, type[Engine]]) -> Engine:
    if isinstance(item, Engine):
        return item
    if item not in known:
        raise EngineError(f"there is no engine {item!r}; known are {', '.join(known)}")
    return known[item]()
